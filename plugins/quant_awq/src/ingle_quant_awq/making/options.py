"""The options of an AWQ quant. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from ingle.plugin import CheckpointInfo, ConfigError

WIDTHS: Final = (3, 4, 8)
GROUP_SIZES: Final = (128, 64, 32)
DENSE_LEAVES: Final = ("gate", "shared_expert_gate")
"""Linears of a block that are not quantised: routers of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqOptions:
    """How AWQ quantises.

    Attributes:
        bits: Bits of a code: 4, which every reader of AWQ reads, 3 or 8.
        group_size: Inputs that share a scale; without it the largest of 128, 64 and 32 that divides
            the inputs of every linear.
        method: `awq` scales inputs by their importance and clips weights; `rtn` rounds every weight
            to the nearest, without calibration.
        sym: No zero points: every group is symmetric about zero.
        duo_scaling: The search for scales looks at weights as well as at activations.
        clip: Searches for the largest weight of each group that is worth keeping.
        search_tokens: Tokens of the calibration over which scales are tried.
    """

    bits: int = 4
    group_size: int | None = None
    method: Literal["awq", "rtn"] = "awq"
    sym: bool = False
    duo_scaling: bool = True
    clip: bool = True
    search_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ConfigError(f"--bits must be one of {', '.join(map(str, WIDTHS))}: {self.bits}.")
        if self.group_size is not None and self.group_size != -1 and self.group_size < 8:
            raise ConfigError(f"--group-size must be -1 or at least 8, got {self.group_size}.")
        if self.search_tokens < 1:
            raise ConfigError(f"--search-tokens must be at least 1, got {self.search_tokens}.")


def linear_shapes(source: CheckpointInfo) -> dict[str, tuple[int, int]]:
    """(N, K) of the linears that will be quantised, by tensor name; of one expert for a stack."""
    shapes = {}
    for name, shape in source.tensor_shapes.items():
        stem = name.removesuffix(".weight")
        if ".layers." in name and len(shape) > 1 and not stem.endswith(_dense_endings()):
            shapes[name] = (shape[-2], shape[-1])
    return shapes


def dense_linears(source: CheckpointInfo) -> list[str]:
    """Names of the blocks' linears that stay dense."""
    endings = tuple(f"{ending}.weight" for ending in _dense_endings())
    names = (name for name in source.tensor_shapes if name.endswith(endings))
    return [name.removesuffix(".weight") for name in names if ".layers." in name]


def settle_group_size(options: AwqOptions, source: CheckpointInfo) -> int:
    """The group size to use; -1 is one group.

    Raises:
        ConfigError: When it does not divide some linear's inputs, or outputs do not fill words.
    """
    shapes = linear_shapes(source)
    for name, (outputs, _) in shapes.items():
        if outputs * options.bits % 32:
            raise ConfigError(
                f"{name} has {outputs} outputs; {options.bits}-bit codes of them do not fill "
                "whole words, as AWQ's layout needs."
            )
    inputs = {k: name for name, (_, k) in shapes.items()}
    if options.group_size is None:
        found = next((size for size in GROUP_SIZES if _divides(size, inputs)), None)
        if found is None:
            raise ConfigError(
                f"none of {', '.join(map(str, GROUP_SIZES))} divides the inputs of every linear "
                f"({', '.join(map(str, sorted(inputs)))}); choose a --group-size that does."
            )
        return found
    if options.group_size == -1 or _divides(options.group_size, inputs):
        return options.group_size
    wrong = next(k for k in inputs if k % options.group_size)
    fitting = [size for size in GROUP_SIZES if _divides(size, inputs)]
    hint = f"; {', '.join(map(str, fitting))} would do" if fitting else ""
    raise ConfigError(
        f"--group-size {options.group_size} does not divide the {wrong} inputs of "
        f"{inputs[wrong]}, as AWQ's layout needs{hint}."
    )


def _divides(size: int, inputs: Iterable[int]) -> bool:
    return all(k % size == 0 for k in inputs)


def _dense_endings() -> tuple[str, ...]:
    return tuple(f".{leaf}" for leaf in DENSE_LEAVES)
