"""8-bit affine weights on a CPU, and one row times such a weight, for compiled decode steps.

The codes are read as they lie, a byte each along the inputs, sixteen at a time. Scales are copied
to lie in the same order: as [G, N] they are in as many places as there are groups.

Shape letters: N output features, K input features, G groups of inputs, V vectors in a group, L
lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ingle.plugin import AffineWeight, RowProduct

LANES = 16
STREAMS = 4
"""Places a product reads its weight from at once, as for dense weights."""
MAX_VECTORS = 16
"""Of a group: their products are written out without a loop."""


@dataclass(kw_only=True, eq=False, repr=False)
class ByteWeight(AffineWeight):
    """An affine weight of 8 bits; ``codes`` hold four inputs in a word, so K is a multiple of 4."""

    def row_product(self) -> RowProduct | None:
        """A loop over the bytes, for equal groups of whole vectors."""
        whole = self.num_groups * self.group_size == self.in_features
        vectors, rest = divmod(self.group_size, LANES)
        if rest or not whole or self.group_offsets is not None:
            return None
        if vectors > MAX_VECTORS:
            vectors = next(n for n in range(MAX_VECTORS, 0, -1) if vectors % n == 0)
        codes = self.codes.view(torch.uint8)
        shape = (self.stored_out_features, self.num_groups, -1, vectors, LANES)
        tables = [t for t in (self.scales, self.offsets, self.zeros) if t is not None]
        function = _ROWS[self.offsets is not None, self.zeros is not None]
        own = codes.view(shape)
        sizes = tuple((tuple(t.shape[::-1]), t.dtype) for t in tables)
        return RowProduct(
            function=function,
            shapes=((tuple(own.shape), own.dtype), *sizes),
            tensors=lambda: (own, *(t.T.contiguous() for t in tables)),
            copied_bytes=sum(t.numel() * t.element_size() for t in tables),
        )


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


def offset_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of codes, scales and float offsets."""
    return _row(tensors, x, lambda one, total, scale, offset: one * scale + total * offset)


def zero_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of codes, scales and integer zeros."""
    return _row(tensors, x, lambda one, total, scale, zero: (one - total * zero) * scale)


def middle_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of codes and scales, every zero being 128."""
    return _row(tensors, x, lambda one, total, scale: (one - total * 128.0) * scale)


_ROWS = {
    (False, False): middle_row,
    (False, True): zero_row,
    (True, False): offset_row,
}
"""By whether there are offsets, and whether there are zeros."""


def _row(
    tensors: Sequence[torch.Tensor], x: torch.Tensor, value: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """``value`` makes of the sum of a run of codes [N, G, runs, L], the sum of its inputs, and
    what the tables, [N, G], have for its group, what the run adds to the output."""
    codes = tensors[0]
    inputs = x.view(codes.shape[1:])
    totals = inputs.sum(2)
    streams = STREAMS if codes.shape[0] % STREAMS == 0 else 1
    outs = [
        value(
            (part.float() * inputs).sum(3),
            totals,
            *(one[:, :, None, None].float() for one in columns),
        ).sum((1, 2, 3))
        for part, *columns in zip(*(one.chunk(streams) for one in tensors), strict=True)
    ]
    return torch.cat(outs)
