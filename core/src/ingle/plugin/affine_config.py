"""What a checkpoint says about its own integer quantisation, whichever file says it.

The words differ from writer to writer (``bits``, ``w_bit``, ``wbits``) and so do the files. A
format believes none of it against the tensors: it decides only what shapes leave open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingle.errors import CheckpointError
from ingle.plugin.checkpoint import CheckpointInfo

_FILES = ("quantize_config.json", "quant_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOptions:
    """What the config says about one module; None where it says nothing usable."""

    bits: int | None
    group_size: int | None
    symmetric: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineConfig:
    """The quantisation config of one checkpoint; every key is optional.

    Attributes:
        values: The JSON object as found; empty when there is none.
        source: The file it came from, for messages; empty when there is none.
    """

    values: Mapping[str, Any]
    source: str

    @classmethod
    def find(cls, info: CheckpointInfo) -> AffineConfig:
        """From ``config.json``, else ``quantize_config.json``, else ``quant_config.json``."""
        if info.quantization_config:
            return cls(values=info.quantization_config, source="config.json")
        for name in _FILES:
            values = info.config_files.get(name)
            if values:
                return cls(values=values, source=name)
        return cls(values={}, source="")

    def text(self, *keys: str) -> str | None:
        """The first of ``keys`` that holds a string, in lower case."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, str) and value:
                return value.lower()
        return None

    @property
    def method(self) -> str | None:
        """The quantisation method it names, in lower case; None where old files leave it out."""
        return self.text("quant_method", "method")

    @property
    def layout(self) -> str | None:
        """The storage layout it names, in lower case."""
        return self.text("packing_format", "checkpoint_format", "format", "version")

    def module(self, name: str) -> ModuleOptions:
        """What it says about the module with checkpoint name ``name``, overrides applied."""
        override = self._dynamic(name) or self._extra_config(name)
        values = {**self.values, **override}
        symmetric = _symmetric(override)
        return ModuleOptions(
            bits=_integer(values, "bits", "w_bit", "wbits"),
            group_size=_integer(values, "group_size", "q_group_size", "groupsize"),
            symmetric=_symmetric(self.values) if symmetric is None else symmetric,
        )

    def _dynamic(self, name: str) -> Mapping[str, Any]:
        """GPTQModel's ``dynamic``: patterns matched at the start of the name, first match wins.

        Negative patterns (``-:``) mean "not quantised", which the tensors already say.
        """
        for pattern, override in _mapping(self.values.get("dynamic")).items():
            expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
            if self._compile(expression).match(name):
                return {} if pattern.startswith("-:") else _mapping(override)
        return {}

    def _extra_config(self, name: str) -> Mapping[str, Any]:
        """AutoRound's ``extra_config``: the exact name, else a suffix, else a pattern."""
        extra = _mapping(self.values.get("extra_config"))
        if name in extra:
            return _mapping(extra[name])
        suffixes = (key for key in extra if name.endswith(key))
        patterns = (key for key in extra if self._compile(key).search(name))
        key = next(suffixes, None) or next(patterns, None)
        return {} if key is None else _mapping(extra[key])

    def _compile(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{self.source}: {pattern!r} is not a regular expression ({error}); correct it"
            ) from error


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(values: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _symmetric(values: Mapping[str, Any]) -> bool | None:
    """``sym``, else the opposite of ``zero_point``, else unknown (old files)."""
    if isinstance(values.get("sym"), bool):
        return bool(values["sym"])
    if isinstance(values.get("zero_point"), bool):
        return not values["zero_point"]
    return None
