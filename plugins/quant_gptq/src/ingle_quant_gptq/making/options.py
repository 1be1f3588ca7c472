"""The options of a GPTQ quant, and how single modules deviate from them. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from ingle.plugin import ConfigError

WIDTHS: Final = (2, 3, 4, 8)
_OVERRIDABLE: Final = (
    "bits", "group_size", "sym", "desc_act", "static_groups", "act_group_aware", "mse",
    "damp_percent",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqOptions:
    """How GPTQ quantises.

    Attributes:
        bits: Bits of a code: 2, 3, 4 or 8.
        group_size: Inputs that share a scale; -1 is all of a linear's.
        method: `gptq` spreads rounding errors by second-order information; `rtn` rounds every
            weight to the nearest, without calibration.
        sym: Zero points are all in the middle, which every kernel reads; `--no-sym` gives each
            group its own.
        desc_act: Quantises inputs in order of their activations; groups then follow that order,
            which costs a gather when serving.
        static_groups: With `--desc-act`, groups stay in natural order.
        act_group_aware: Without `--desc-act`, quantises groups, and inputs inside them, in order of
            their activations; it costs nothing when serving.
        mse: Power of a search for the range with the least error, 2.4 in GPTQ's code; 0 is off.
        damp_percent: Share of the mean of the Hessian's diagonal that is added to it.
        true_sequential: Stages of a block see inputs that the stages before have quantised.
        lm_head: Quantises the output head too.
        dynamic: JSON object, or a file with one: pattern of module names to options that differ;
            `-:PATTERN` leaves modules dense. The first pattern that matches wins.
    """

    bits: int = 4
    group_size: int = 128
    method: Literal["gptq", "rtn"] = "gptq"
    sym: bool = True
    desc_act: bool = False
    static_groups: bool = False
    act_group_aware: bool = True
    mse: float = 0.0
    damp_percent: float = 0.05
    true_sequential: bool = True
    lm_head: bool = False
    dynamic: str | None = None

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ConfigError(f"--bits must be one of {', '.join(map(str, WIDTHS))}: {self.bits}.")
        if self.group_size != -1 and self.group_size < 8:
            raise ConfigError(f"--group-size must be -1 or at least 8, got {self.group_size}.")
        if not 0 < self.damp_percent < 1:
            raise ConfigError(f"--damp-percent lies between 0 and 1, got {self.damp_percent}.")
        if self.mse < 0:
            raise ConfigError(f"--mse must be 0 or a power above it, got {self.mse}.")
        self.rules()

    def rules(self) -> dict[str, Mapping[str, Any] | None]:
        """``dynamic`` as an object; None leaves a module dense. Those come first, as GPTQModel
        orders them."""
        found = _read_rules(self.dynamic)
        negative = {key: None for key in found if key.startswith("-:")}
        positive = {
            key: _checked(key, value) for key, value in found.items() if key not in negative
        }
        return {**negative, **positive}

    def of_module(self, name: str) -> GptqOptions | None:
        """The options of module ``name``; None: it stays dense."""
        for pattern, changes in self.rules().items():
            expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
            if re.match(expression, name):
                return None if changes is None else replace(self, dynamic=None, **changes)
        return self


def _read_rules(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--dynamic: no JSON object, and no file: {error}.") from None
    try:
        found = json.loads(text)
        for pattern in found:
            re.compile(pattern[2:] if pattern[:2] in ("+:", "-:") else pattern)
    except (ValueError, TypeError, re.error) as error:
        raise ConfigError(f"--dynamic cannot be understood: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError("--dynamic must be a JSON object: pattern to options.")
    return found


def _checked(pattern: str, changes: object) -> Mapping[str, Any]:
    if not isinstance(changes, dict):
        raise ConfigError(f"--dynamic {pattern!r}: wanted is an object with options.")
    unknown = sorted(set(changes) - set(_OVERRIDABLE))
    if unknown:
        raise ConfigError(
            f"--dynamic {pattern!r}: {', '.join(unknown)} cannot differ between modules; only "
            f"{', '.join(_OVERRIDABLE)} can."
        )
    kinds = {f.name: f.type for f in fields(GptqOptions)}
    for key, value in changes.items():
        wanted = {"int": int, "bool": bool, "float": (int, float)}[str(kinds[key])]
        if not isinstance(value, wanted) or (isinstance(value, bool) and kinds[key] != "bool"):
            raise ConfigError(f"--dynamic {pattern!r}: {key} is {value!r}.")
    return changes
