"""How AWQ's layouts place codes in words; formulas only, no files.

Shape letters: N output features, K input features.
Sources: AutoAWQ 0.2.9 (gemm, gemv, gemv_fast packers), llm-awq, AutoRound 0.16.1.
"""

from __future__ import annotations

from typing import Final

import torch

from ingle.plugin.affine_packing import reorder_runs, unpack_bits

INTERLEAVE: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Logical column 8c + j of a gemm word is its field number ``INTERLEAVE[j]``."""

_TILE: Final = 64
_ROWS: Final = 4


def unpack_columns(words: torch.Tensor, bits: int, count: int, interleaved: bool) -> torch.Tensor:
    """Codes packed along the outputs: words [R, W] to uint8 [R, ``count``]."""
    capacity = words.shape[1] * words.element_size() * 8 // bits
    if not interleaved:
        return unpack_bits(words, bits, count)
    fields = unpack_bits(words, bits, capacity - capacity % len(INTERLEAVE))
    return reorder_runs(fields, INTERLEAVE)[:, :count]


def transpose_gemm(words: torch.Tensor) -> torch.Tensor:
    """4-bit gemm words (int32 [K, W], K in whole eights) as streams along the inputs.

    The result is int32 [8W, K/8]. It equals unpacking, transposing and packing, in a third of the
    time: eight words of one column are turned as an 8 x 8 square of nibbles.
    """
    squares = words.view(-1, 8, words.shape[1])
    streams = words.new_empty(words.shape[1], 8, squares.shape[0])
    for column, nibble in enumerate(INTERLEAVE):
        stream = torch.zeros_like(squares[:, 0])
        for k in range(8):
            stream |= ((squares[:, k] >> 4 * nibble) & 15) << 4 * k
        streams[:, column] = stream.T
    return streams.flatten(0, 1)


def unpack_gemv_fast(words: torch.Tensor) -> torch.Tensor:
    """Codes of gemv_fast words (int16 [N/4, K]): uint8 [N, K].

    Four rows are interleaved, 64 columns of each in turn; within a row the 32 columns of a half
    are spread so that one load feeds four lanes, and within each 8 evens come before odds.
    """
    quarter, inputs = words.shape
    fields = unpack_bits(words, 4, inputs * 4)
    stored = fields.view(quarter, inputs // _TILE, _ROWS, _TILE).permute(0, 2, 1, 3)
    rows = stored.reshape(quarter * _ROWS, inputs)
    return reorder_runs(rows, [_stored_column(k) for k in range(32)])


def _stored_column(k: int) -> int:
    """Where column ``k`` of a run of 32 stands in the stored run."""
    spread = (k % 8) // 2 * 8 + k // 8 * 2 + k % 2
    return spread // 8 * 8 + spread % 2 * 4 + spread % 8 // 2
