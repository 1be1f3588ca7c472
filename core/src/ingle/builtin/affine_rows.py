"""One row times an affine weight of 8 bits, for compiled decode steps on a CPU.

Runs of inputs that lie in one group are multiplied and summed; what a run's sum stands for, by its
group's scale and zero, goes into the output. The compiler makes one loop of it that reads the codes
once, as they lie, along the inputs, sixteen at a time. Scales are copied to lie in the same order:
as [G, N] they are in as many places as there are groups.

Shape letters: N output features, K input features, G groups of inputs, V vectors in a run, L lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from ingle.builtin.nibble_words import one_after_another

LANES = 16
"""Bytes that become a vector of float32 in AVX-512; with AVX2 two."""
MAX_VECTORS = 16
"""Of a run of bytes."""
STREAMS = 4
"""Places that bytes are read from at once, as dense weights are."""


def byte_runs(codes: torch.Tensor, num_groups: int) -> torch.Tensor | None:
    """``codes`` uint8 [N, K] seen as [N, G, runs, V, L], the same memory; None when a group (K/G
    inputs) has no whole vectors."""
    vectors, rest = divmod(codes.shape[1] // num_groups, LANES)
    if rest:
        return None
    return codes.view(codes.shape[0], num_groups, -1, gcd(vectors, MAX_VECTORS), LANES)


def byte_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of ``byte_runs``, and the scales and, if there are any, the zeros
    (integers) or offsets (floats), each [N, G]; without them every zero is 128."""
    inputs = x.view(tensors[0].shape[1:])
    totals = _written_out(inputs)
    streams = STREAMS if tensors[0].shape[0] % STREAMS == 0 else 1
    outs = [
        _terms(
            _written_out(codes.float() * inputs),
            totals,
            [table[:, :, None, None] for table in tables],
            128.0,
        ).sum((1, 2, 3))
        for codes, *tables in zip(*(one.chunk(streams) for one in tensors), strict=True)
    ]
    return torch.cat(outs)


def _terms(
    sums: torch.Tensor, totals: torch.Tensor, tables: Sequence[torch.Tensor], middle: float
) -> torch.Tensor:
    """What runs add to the outputs, from the sums of their codes times inputs, the sums of their
    inputs, and what the tables (scales, then zeros or offsets, if any) have for their groups."""
    scales = tables[0].float()
    if len(tables) == 1:
        return (sums - totals * middle) * scales
    other = tables[1].float()
    if tables[1].is_floating_point():
        return sums * scales + totals * other
    return (sums - totals * other) * scales


def _written_out(terms: torch.Tensor) -> torch.Tensor:
    """The sum over V, [..., V, L] to [..., L]."""
    return one_after_another(terms.unbind(-2))
