"""The linears of a block as EXL2 sees them: by part, with a place in the tables of options.

Letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ingle.plugin import ConfigError, LinearSite, QuantizerBlock
from ingle_quant_exl2.layout import ROW_UNIT
from ingle_quant_exl2.loader import MAX_IN_FEATURES
from ingle_quant_exl2.making.options import ATTENTION, MLP, Option, padded, stored_bits

TABLES: Final[Mapping[str, tuple[Option, ...]]] = {"attention": ATTENTION, "feed_forward": MLP}
"""The options of each part of a block."""
_OTHER_NAMES: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_JOINED: Final = ("qkv_proj", "gate_up_proj")


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """One linear.

    Attributes:
        name: Checkpoint name.
        key: Its name in the tables.
        out_features: N.
        in_features: K.
    """

    name: str
    key: str
    out_features: int
    in_features: int

    def bits(self, option: Option) -> int:
        """Bits it takes under ``option``."""
        return stored_bits(option[self.key].layout(self.in_features), padded(self.out_features))


def quantised_sites(block: QuantizerBlock, part: str) -> Iterator[LinearSite]:
    """The sites of a part whose linears are quantised."""
    return (site for site in block.sites if site.part == part and site.quantizable)


def linears(block: QuantizerBlock, site: LinearSite) -> list[BlockLinear]:
    """The linears of a site.

    Raises:
        ConfigError: When EXL2 cannot hold one of them.
    """
    return [_linear(name, block.weight(name)) for name in site.names]


def part_linears(block: QuantizerBlock, part: str) -> list[BlockLinear]:
    """All linears of a part. Raises ``ConfigError`` as ``linears``."""
    return [item for site in quantised_sites(block, part) for item in linears(block, site)]


def _linear(name: str, weight: torch.Tensor) -> BlockLinear:
    leaf = name.rpartition(".")[2]
    out_features, in_features = weight.shape
    if leaf in _JOINED:
        raise ConfigError(
            f"{name}: this model stores several projections as one tensor, and EXL2 files have "
            "them apart. Save the model with its projections split first."
        )
    if in_features % ROW_UNIT or in_features > MAX_IN_FEATURES:
        raise ConfigError(
            f"{name} has {in_features} input features; EXL2 wants a multiple of {ROW_UNIT}, at "
            f"most {MAX_IN_FEATURES}. The model cannot be an EXL2 quant."
        )
    return BlockLinear(name, _OTHER_NAMES.get(leaf, leaf), out_features, in_features)
