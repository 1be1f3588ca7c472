"""GPTQModel's planar packing (``gptq_p``) of 3, 5, 6 and 7-bit codes.

32 codes fill b words, plane by plane from the low bits up: 3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1. A
plane of width p is p words, word j of it holding p bits of each of codes 32/p * j onwards.
"""

from __future__ import annotations

from typing import Final

import torch

from ingle.plugin.affine_packing import WORD_BITS, in_runs, unpack_bits

_PLANES: Final = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}


def unpack_planes(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """All codes along ``axis``: uint8, that axis moved last; words are int32, b per 32 codes."""
    blocks = in_runs(words.movedim(axis, -1), bits)
    codes = torch.zeros((*blocks.shape[:-1], WORD_BITS), dtype=torch.uint8)
    first = 0
    for width in _PLANES[bits]:
        plane = blocks[..., first : first + width].contiguous()
        codes |= _fields(plane, width) << first
        first += width
    return codes.flatten(-2)


def _fields(plane: torch.Tensor, width: int) -> torch.Tensor:
    """32 fields of ``width`` bits from ``width`` words; a width of 1 is read as pairs."""
    if width > 1:
        return unpack_bits(plane, width, WORD_BITS)
    pairs = unpack_bits(plane, 2, WORD_BITS // 2)
    return torch.stack((pairs & 1, pairs >> 1), dim=-1).flatten(-2)
