"""One row times a 4-bit weight in planar layout, for compiled decode steps on a CPU.

The nibbles are read as 32-bit words, sixteen of them at a time: with blocks of 64 outputs a word
has eight codes of one input, and sixteen words are two inputs of the block. So there are eight sums
for each block, one for every place of a nibble in a word, each as wide as a vector of sixteen
float32; a nibble is masked and not shifted, and the power of two that it then is too large by goes
into the sum's factor. Scales lie in the order of the sums' lanes, which is a copy of them.

Shape letters: N output features, NB blocks of outputs, K input features, G groups of inputs, V
vectors in a run, L lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch

LANES = 16
"""Words in a vector of AVX-512; with AVX2 they are two."""
NIBBLES = 8
"""Of a word."""
MAX_RUN = 32
"""Inputs whose products are written out without a loop; a run lies in one group."""
MIN_RUNS = 8
"""A loop over fewer runs would be written out as well."""


def words(codes: torch.Tensor, num_groups: int) -> torch.Tensor | None:
    """``codes`` uint8 [NB, K, B/2] seen as int32 [NB, G, runs, V, L], the same memory; None when a
    group (K/G inputs) has no whole vectors."""
    blocks, inputs, half = codes.shape
    most = MAX_RUN if inputs >= MIN_RUNS * MAX_RUN else MAX_RUN // 4
    run = gcd(inputs // num_groups, most)
    if run * half % (4 * LANES):
        return None
    vectors = run * half // (4 * LANES)
    return codes.view(torch.int32).view(blocks, num_groups, -1, vectors, LANES)


def lane_table(table: torch.Tensor, half: int) -> torch.Tensor:
    """A value for each group and output, [G, N], in the order of the sums: [NB, G, 8, L];
    ``half`` is B/2 and N whole blocks."""
    groups, per_input = table.shape[0], half // 4
    split = table.view(groups, -1, 2, per_input, 4).permute(1, 0, 4, 2, 3)
    lanes = split.unsqueeze(4).expand(-1, -1, -1, -1, LANES // per_input, -1)
    return lanes.reshape(-1, groups, NIBBLES, LANES)


def offset_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of words, scales and float offsets."""
    return _row(tensors, x, lambda one, total, scale, offset: one * scale + total * offset)


def zero_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of words, scales and integer zeros."""
    return _row(tensors, x, lambda one, total, scale, zero: (one - total * zero) * scale)


def middle_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of words and scales, every zero being 8."""
    return _row(tensors, x, lambda one, total, scale: (one - total * 8.0) * scale)


def _row(
    tensors: Sequence[torch.Tensor], x: torch.Tensor, value: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """``value`` makes of a run's sum, the sum of its inputs, and what the tables have for it, what
    the run adds to its output."""
    codes, *tables = tensors
    inputs = _inputs(codes, x)
    totals = _written_out(inputs)
    sums = [
        value(_sum(codes, inputs, at), totals, *(_of(table, at) for table in tables)).sum((1, 2))
        for at in range(NIBBLES)
    ]
    return _in_order(sums, codes, x)


def _inputs(codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x`` float32 [K] once for each lane that it is multiplied in, [G, runs, V, L]."""
    _, groups, runs, vectors, lanes = codes.shape
    repeats = groups * runs * vectors * lanes // x.shape[0]
    spread = x.view(-1, 1).expand(-1, repeats).contiguous()
    return _stored(spread.view(groups, runs, vectors, lanes))


def _sum(codes: torch.Tensor, inputs: torch.Tensor, at: int) -> torch.Tensor:
    """Nibble ``at`` of each word times its input, summed over each run: [NB, G, runs, L]. The
    last nibble is shifted first, by four bits, for it would bring the sign."""
    shifted = codes >> 4 if at == NIBBLES - 1 else codes
    place = min(4 * at, 24)
    return _written_out((shifted & (15 << place)).float() * inputs) * 2.0**-place


def _written_out(terms: torch.Tensor) -> torch.Tensor:
    """The sum over V, [..., V, L] to [..., L]: in fours, which the compiler writes out."""
    while terms.shape[-2] > 4:
        terms = terms.view(*terms.shape[:-2], 4, -1, terms.shape[-1]).sum(-3)
    return terms.sum(-2)


def _of(table: torch.Tensor, at: int) -> torch.Tensor:
    """Of a ``lane_table`` what belongs to sum ``at``, for every run: [NB, G, 1, L]."""
    return table[:, :, at].float().unsqueeze(2)


def _in_order(sums: Sequence[torch.Tensor], codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Eight sums [NB, L] as one row [N], written to memory."""
    repeats = codes[0].numel() // x.shape[0]
    both = torch.stack(tuple(sums), 1).view(-1, 4, 2, LANES // repeats, repeats).sum(3)
    return _stored(both.permute(0, 2, 3, 1).reshape(-1))


def _stored(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous, which compiled code writes to memory, once."""
    return torch.as_strided(x, x.shape, x.stride())
