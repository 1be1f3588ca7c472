"""4-bit codes as 32-bit words for compiled CPU code: the layout, and one row times it.

A word has eight codes of one output, input 8i + j in bits 4j to 4j + 3, and lies beside the words
of fifteen more outputs: int32 [N/16, K/8, 16]. So a vector of words is multiplied by one number at
a time, scales lie along the vector as often as there are groups, and a processor reads one short
stretch of memory after the other, which is what its prefetchers know. Blocks of outputs of the
planar layout (``planar_cpu``) take the same bytes, so one layout can be written over the other.

The nibbles of a word are masked and not shifted: inputs are divided by the power of two that their
nibbles are too large by.

Shape letters: N output features, NB blocks of L = 16 outputs, K input features, G groups of inputs,
B outputs of a planar block, V words in a run of 8V inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

LANES = 16
"""Words in a vector of AVX-512; with AVX2 they are two."""
NIBBLES = 8
"""Of a word."""
MAX_VECTORS = 4
"""Of a run; its products are written out without a loop."""
CHUNK_BYTES = 1 << 22
"""Codes that are rewritten at a time."""


def run_vectors(inputs: int, num_groups: int) -> int:
    """V for groups of ``inputs / num_groups`` inputs; 0 when a group has no whole words."""
    group = inputs // num_groups
    return gcd(group // NIBBLES, MAX_VECTORS) if group % NIBBLES == 0 else 0


def words_shape(outputs: int, inputs: int, num_groups: int) -> tuple[int, ...]:
    """[NB, G, runs, V, L], as ``word_row`` reads words; V is not 0."""
    vectors = run_vectors(inputs, num_groups)
    runs = inputs // num_groups // NIBBLES // vectors
    return (outputs // LANES, num_groups, runs, vectors, LANES)


def as_words(codes: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Rewritten ``codes`` uint8 [N/B, K, B/2] seen as int32 [NB, G, K / 8G, L]."""
    words = codes.view(torch.int32)
    return words.view(-1, num_groups, codes.shape[1] // num_groups // NIBBLES, LANES)


def planar_to_words(codes: torch.Tensor) -> torch.Tensor:
    """Planar ``codes`` uint8 [N/B, K, B/2] as words of the same outputs, in the same shape."""
    blocks, inputs, half = codes.shape
    low, high = codes[:, 0::2], codes[:, 1::2]
    pairs = torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 240)), 1)
    # [N/B, half of the block, K/8, byte of the word, lane block, lane]
    split = pairs.view(blocks, 2, inputs // NIBBLES, NIBBLES // 2, half // LANES, LANES)
    return split.permute(0, 1, 4, 2, 5, 3).reshape(codes.shape)


def words_to_planar(words: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    blocks, inputs, half = words.shape
    split = words.view(blocks, 2, half // LANES, inputs // NIBBLES, LANES, NIBBLES // 2)
    low, high = split.permute(0, 1, 3, 5, 2, 4).reshape(blocks, 2, -1, half).unbind(1)
    return torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 240)), 2).view(words.shape)


def rewrite(codes: torch.Tensor) -> None:
    """Writes words over planar codes, block after block."""
    with torch.inference_mode():
        step = max(1, CHUNK_BYTES // codes[0].numel())
        for first in range(0, codes.shape[0], step):
            part = codes[first : first + step]
            part.copy_(planar_to_words(part))


def lane_table(table: torch.Tensor) -> torch.Tensor:
    """A value for each group and output, [G, N], as words lie: [NB, G, L]."""
    return table.view(table.shape[0], -1, LANES).transpose(0, 1).contiguous()


def word_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of words [NB, G, runs, V, L], and ``lane_table`` of the scales and, if
    there are any, of the zeros (integers) or offsets (floats); without them every zero is 8."""
    codes, *tables = tensors
    inputs = x.view(*codes.shape[1:4], NIBBLES)
    sums = run_sums(codes, stored(in_place(x)).view(inputs.shape))
    return stored(terms(sums, stored(total(inputs)), tables).sum((1, 2)).view(-1))


def in_place(x: torch.Tensor) -> torch.Tensor:
    """``x`` float32 [..., K] as ``run_sums`` takes it: divided by 16 ** j where its nibbles are too
    large by that. Exact."""
    powers = torch.tensor([16.0 ** -(at % NIBBLES) for at in range(NIBBLES - 1)] + [1.0])
    return (x.view(-1, LANES) * powers.repeat(LANES // NIBBLES)).view(x.shape)


def run_sums(codes: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Codes [..., V, L] times ``inputs`` [..., V, 8], which are ``in_place``, summed over runs:
    [..., L]. Only the last nibble, which has the word's sign, is shifted."""
    places = range(NIBBLES)
    numbers = [codes & (15 << 4 * at) for at in places[:-1]] + [(codes >> 28) & 15]
    return one_after_another(
        [
            numbers[at][..., v, :].float() * inputs[..., v, at].unsqueeze(-1)
            for at in places
            for v in range(codes.shape[-2])
        ]
    )


def total(inputs: torch.Tensor) -> torch.Tensor:
    """The sum of each run's ``inputs`` [..., V, 8]: [..., 1]."""
    both = [inputs[..., v, at] for v in range(inputs.shape[-2]) for at in range(NIBBLES)]
    return one_after_another(both).unsqueeze(-1)


def one_after_another(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum; compiled, fused multiply-adds without a loop."""
    result = terms[0]
    for one in terms[1:]:
        result = result + one
    return result


def terms(sums: torch.Tensor, totals: torch.Tensor, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """What runs add to the outputs, from the sums of their codes times inputs [..., G, runs, L],
    the sums of their inputs [..., G, runs, 1], and tables [..., G, L]."""
    scales = tables[0].float().unsqueeze(-2)
    if len(tables) == 1:
        return (sums - totals * 8.0) * scales
    other = tables[1].float().unsqueeze(-2)
    if tables[1].is_floating_point():
        return sums * scales + totals * other
    return (sums - totals * other) * scales


def stored(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous, which compiled code writes to memory, once."""
    x = x.contiguous()
    return torch.as_strided(x, x.shape, x.stride())
