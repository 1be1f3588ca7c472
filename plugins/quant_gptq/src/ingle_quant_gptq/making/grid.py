"""The grid that weights are rounded to: a scale and a zero point for each row and group.

Shape letters: N output features, K inputs of a group.
Source: the quantizer of GPTQ's code (Frantar et al. 2022), with scales rounded to float16 first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

SHRINKS: Final = tuple(1 - i / 100 for i in range(80))
"""Shares of the range that a search tries."""
LEAST_SCALE: Final = 2.0**-24
"""The smallest number above zero that float16 has."""
MOST_SCALE: Final = 65504.0


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Width and kind of a grid; ``power`` is the norm of the search, 0 for none."""

    bits: int
    sym: bool
    power: float = 0.0

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


@dataclass(frozen=True, slots=True)
class Grid:
    """``w = (q - zero) * scale``, q from 0 to ``top``.

    Attributes:
        scale: float32 [N], exact in float16.
        zero: float32 [N], whole numbers from 0 to ``top``.
        top: The largest code.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    top: int

    def codes(self, column: torch.Tensor) -> torch.Tensor:
        """The nearest codes for a column [N]: float32 [N], whole numbers."""
        return (column / self.scale).round_().add_(self.zero).clamp_(0, self.top)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes [N] stand for."""
        return (codes - self.zero) * self.scale


def find_grid(weight: torch.Tensor, options: GridOptions) -> Grid:
    """The grid of one group: ``weight`` float32 [N, K]."""
    low = weight.amin(1).clamp(max=0)
    high = weight.amax(1).clamp(min=0)
    if options.sym:
        most = torch.maximum(-low, high)
        low, high = torch.where(low < 0, -most, low), most
    empty = (low == 0) & (high == 0)
    low, high = low.masked_fill(empty, -1), high.masked_fill(empty, 1)
    if options.power > 0:
        return _search(weight, low, high, options)
    return _grid(low, high, options)


def _grid(low: torch.Tensor, high: torch.Tensor, options: GridOptions) -> Grid:
    scale = ((high - low) / options.top).clamp(LEAST_SCALE, MOST_SCALE).half().float()
    if options.sym:
        zero = torch.full_like(scale, float(1 << (options.bits - 1)))
    else:
        zero = (-low / scale).round().clamp(0, options.top)
    return Grid(scale, zero, options.top)


def _search(
    weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, options: GridOptions
) -> Grid:
    """Each row's best share of its range."""
    best = torch.full_like(low, torch.inf)
    kept = _grid(low, high, options)
    scale, zero = kept.scale.clone(), kept.zero.clone()
    for share in SHRINKS:
        tried = _grid(share * low, share * high, options)
        codes = (weight / tried.scale[:, None]).round_().add_(tried.zero[:, None])
        codes.clamp_(0, options.top).sub_(tried.zero[:, None]).mul_(tried.scale[:, None])
        error = codes.sub_(weight).abs_().pow_(options.power).sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried.scale, scale)
        zero = torch.where(better, tried.zero, zero)
    return Grid(scale, zero, options.top)
