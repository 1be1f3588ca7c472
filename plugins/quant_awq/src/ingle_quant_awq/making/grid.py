"""AWQ's grid, and how its codes lie in words.

Shape letters: N output features, K input features, G groups, g inputs of a group, b bits.
Sources: AutoAWQ 0.2.9's quantizer; the gemm layout as it packs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ingle.plugin.affine_packing import pack_bits, reorder_runs

LEAST_RANGE: Final = 1e-5
FIELD_OF_COLUMN: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Field i of a 4-bit word holds logical column ``FIELD_OF_COLUMN[i]`` of its eight."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What weights are rounded to.

    Attributes:
        bits: b.
        group_size: g; -1 is K.
        sym: Whether zero points are all in the middle.
    """

    bits: int
    group_size: int
    sym: bool

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        """[N, K] as [N, G, g]."""
        size = weight.shape[1] if self.group_size == -1 else self.group_size
        return weight.reshape(weight.shape[0], -1, size)

    def fit(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of every group of ``weight`` [N, K]: float32 [N, G, 1] each."""
        groups = self.grouped(weight)
        top = (1 << self.bits) - 1
        if self.sym:
            middle = 1 << (self.bits - 1)
            scale = groups.abs().amax(2, keepdim=True).clamp(min=LEAST_RANGE) / (middle - 1)
            return scale, torch.full_like(scale, float(middle))
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (high - low).clamp(min=LEAST_RANGE) / top
        return scale, (-torch.round(low / scale)).clamp(0, top)

    def codes(self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The nearest codes: float32 [N, G, g], whole numbers."""
        rounded = torch.round(self.grouped(weight) / scale).add_(zero)
        return rounded.clamp_(0, (1 << self.bits) - 1)

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [N, K] rounded to its grid."""
        scale, zero = self.fit(weight)
        return self.codes(weight, scale, zero).sub_(zero).mul_(scale).view(weight.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """A quantised linear.

    Attributes:
        bits: b.
        codes: uint8 [N, K].
        scales: float16 [G, N].
        zeros: uint8 [G, N].
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, grid: Grid) -> Rounded:
        """``weight`` float32 [N, K], with scales that are float16 before codes are found."""
        halved = weight.half().float()
        scale, _ = grid.fit(halved)
        scale = scale.half().float().clamp(min=2.0**-24)
        if grid.sym:
            zero = torch.full_like(scale, float(1 << (grid.bits - 1)))
        else:
            low = grid.grouped(halved).amin(2, keepdim=True)
            zero = (-torch.round(low / scale)).clamp(0, (1 << grid.bits) - 1)
        codes = grid.codes(halved, scale, zero)
        return cls(
            bits=grid.bits,
            codes=codes.view(weight.shape).to(torch.uint8),
            scales=scale.squeeze(2).T.half().contiguous(),
            zeros=zero.squeeze(2).T.to(torch.uint8).contiguous(),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """As the gemm layout stores them: everything packed along the outputs."""
        return {
            "qweight": self._pack(self.codes.T.contiguous()),
            "qzeros": self._pack(self.zeros),
            "scales": self.scales,
        }

    def _pack(self, values: torch.Tensor) -> torch.Tensor:
        if self.bits == 4:
            values = reorder_runs(values, FIELD_OF_COLUMN)
        return pack_bits(values, self.bits)
