"""How many words a run of small codes takes: what headers are read with. No torch here.

Shape letters: b bits.
"""

from __future__ import annotations

from functools import cache
from math import ceil

WORD_BITS = 32


def num_words(count: int, bits: int, word_bits: int = WORD_BITS) -> int:
    """Words that a stream of ``count`` codes takes; the last may be partly used."""
    return ceil(count * bits / word_bits)


@cache  # a checkpoint has thousands of linears and a handful of shapes
def candidate_bits(count: int, words: int, word_bits: int = WORD_BITS) -> tuple[int, ...]:
    """Every width from 2 to 8 at which ``count`` codes fill exactly ``words`` words.

    More than one for very small counts only, where the last word hides the difference.
    """
    return tuple(b for b in range(2, 9) if num_words(count, b, word_bits) == words)
