"""8-bit affine weights as CPUs read them: codes are bytes along the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingle.builtin import affine_rows
from ingle.plugin import AffineWeight, RowProduct
from ingle.plugin.compiled_function import MIN_SIZE


@dataclass(kw_only=True, eq=False, repr=False)
class ByteWeight(AffineWeight):
    """An affine weight of 8 bits; ``codes`` hold four inputs in a word, so K is a multiple of 4."""

    def row_product(self) -> RowProduct | None:
        """A loop over the bytes, for equal groups of whole vectors."""
        if not self.has_equal_groups:
            return None
        runs = affine_rows.byte_runs(self.codes.view(torch.uint8), self.num_groups)
        if runs is None:
            return None
        tables = [t for t in (self.scales, self.offsets, self.zeros) if t is not None]
        sizes = tuple((tuple(t.shape[::-1]), t.dtype) for t in tables)
        return RowProduct(
            function=affine_rows.byte_row,
            shapes=((tuple(runs.shape), runs.dtype), *sizes),
            tensors=lambda: (runs, *(t.T.contiguous() for t in tables)),
            copied_bytes=sum(t.numel() * t.element_size() for t in tables),
        )

    @property
    def byte_groups(self) -> int:
        """G, 2 where it is 1; 0 where groups differ or two have no whole number of inputs."""
        groups = max(MIN_SIZE, self.num_groups)
        return groups if self.has_equal_groups and self.in_features % groups == 0 else 0

    def bytes_by_group(self) -> torch.Tensor:
        """uint8 [N, G, K/G]."""
        return self.codes.view(torch.uint8).view(self.stored_out_features, self.byte_groups, -1)

    def tables(self) -> list[torch.Tensor]:
        """Scales and zeros or offsets, each [G, N]."""
        found = [t for t in (self.scales, self.offsets, self.zeros) if t is not None]
        return [t.expand(self.byte_groups, -1) for t in found]


def byte_weight(weight: AffineWeight) -> ByteWeight:
    """``weight`` (8 bits, K a multiple of 4) around the same tensors."""
    if isinstance(weight, ByteWeight):
        return weight
    return ByteWeight(
        bits=weight.bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
        out_features=weight.out_features,
        **weight.tensors(),
    )
