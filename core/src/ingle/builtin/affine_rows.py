"""One row times an affine weight, for compiled decode steps on a CPU.

Runs of inputs that lie in one group are multiplied and summed; what a run's sum stands for, by its
group's scale and zero, goes into the output. Both functions do that over codes as the weight keeps
them. The compiler makes one loop of each that reads the codes once.

**4 bits, planar.** The nibbles are read as 32-bit words, sixteen of them at a time: with blocks of
64 outputs a word has eight codes of one input, and sixteen words are two inputs of the block. So
there are eight sums for each block, one for every place of a nibble in a word, each as wide as a
vector of sixteen float32; a nibble is masked and not shifted, and the power of two that it then is
too large by goes into the sum's factor. Scales lie in the order of the sums' lanes, which is a copy
of them.

**8 bits.** Bytes are read as they lie, along the inputs, sixteen at a time. Scales are copied to
lie in the same order: as [G, N] they are in as many places as there are groups.

Shape letters: N output features, NB blocks of B outputs, K input features, G groups of inputs, V
vectors in a run, L lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

LANES = 16
"""Words in a vector of AVX-512; with AVX2 they are two."""
NIBBLES = 8
"""Of a word."""
LOWEST = -(1 << 31)
"""A word with nothing but its highest bit."""
MAX_RUN = 32
"""Inputs of a run of nibbles; their products are written out without a loop."""
MIN_RUNS = 8
"""A loop over fewer runs would be written out as well."""
MAX_VECTORS = 16
"""Of a run of bytes."""
STREAMS = 4
"""Places that bytes are read from at once, as dense weights are."""


def nibble_words(codes: torch.Tensor, num_groups: int) -> torch.Tensor | None:
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


def nibble_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of ``nibble_words``, and ``lane_table`` of the scales and, if there are
    any, of the zeros (integers) or offsets (floats); without them every zero is 8."""
    codes, *tables = tensors
    inputs = _inputs(codes, x)
    totals = _written_out(inputs)
    sums = [
        _terms(
            _nibble_sum(codes, inputs, totals, at),
            totals,
            [table[:, :, at].unsqueeze(2) for table in tables],
            8.0,
        ).sum((1, 2))
        for at in range(NIBBLES)
    ]
    return _in_order(sums, codes, x)


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


def _inputs(codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x`` float32 [K] once for each lane that it is multiplied in, [G, runs, V, L]."""
    _, groups, runs, vectors, lanes = codes.shape
    repeats = groups * runs * vectors * lanes // x.shape[0]
    spread = x.view(-1, 1).expand(-1, repeats).contiguous()
    return _stored(spread.view(groups, runs, vectors, lanes))


def _nibble_sum(
    codes: torch.Tensor, inputs: torch.Tensor, totals: torch.Tensor, at: int
) -> torch.Tensor:
    """Nibble ``at`` of each word times its input, summed over each run: [NB, G, runs, L].

    The last nibble has the word's sign. With its highest bit turned over it is a signed number, the
    code less 8; both operations on the word are one instruction of AVX-512.
    """
    place = 4 * at
    if at < NIBBLES - 1:
        return _written_out((codes & (15 << place)).float() * inputs) * 2.0**-place
    signed = (codes ^ LOWEST) & (LOWEST >> 3)
    return _written_out(signed.float() * inputs) * 2.0**-place + totals * 8.0


def _written_out(terms: torch.Tensor) -> torch.Tensor:
    """The sum over V, [..., V, L] to [..., L], one after another: compiled, a multiplication and
    V - 1 fused multiply-adds, without a loop."""
    total = terms[..., 0, :]
    for at in range(1, terms.shape[-2]):
        total = total + terms[..., at, :]
    return total


def _in_order(sums: Sequence[torch.Tensor], codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Eight sums [NB, L] as one row [N], written to memory."""
    repeats = codes[0].numel() // x.shape[0]
    both = torch.stack(tuple(sums), 1).view(-1, 4, 2, LANES // repeats, repeats).sum(3)
    return _stored(both.permute(0, 2, 3, 1).reshape(-1))


def _stored(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous, which compiled code writes to memory, once."""
    return torch.as_strided(x, x.shape, x.stride())
