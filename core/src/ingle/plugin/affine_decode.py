"""How core's Triton products decode a tile of an ``AffineWeight``: any width, groups, zeros.

Shape letters: N output features, K input features, G groups, W words.
"""

# Triton functions take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ingle.plugin.affine import AffineWeight
from ingle.plugin.linear import TritonDecode

MIDDLE, INTEGER, OFFSET = 0, 1, 2
"""Kinds of zeros: all ``2 ** (bits - 1)``, integers, float offsets."""


@triton.jit
def stream_codes(words, k, last, BITS: tl.constexpr):
    """Codes ``k`` of bit streams of ``BITS`` each: int32 [BN, BK].

    words: pointers [BN, 1] to each stream's first word; k: int32 [BK]; last: its last word.
    """
    bit = k * BITS
    word, shift = bit // 32, bit % 32
    codes = tl.load(words + word[None, :]).to(tl.uint32, bitcast=True) >> shift[None, :]
    if 32 % BITS:
        after = tl.load(words + tl.minimum(word + 1, last)[None, :]).to(tl.uint32, bitcast=True)
        # Shifting by a whole word means nothing, so in two steps.
        codes |= (after << (31 - shift)[None, :]) << 1
    return (codes & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def decode_affine(T, n, k, N: tl.constexpr, K: tl.constexpr, META: tl.constexpr, DTYPE):
    """``(code - zero) * scale`` or ``code * scale + offset``: [BN, BK]. See ``TritonDecode``."""
    BITS: tl.constexpr = META[0]
    KIND: tl.constexpr = META[1]
    NUM_WORDS: tl.constexpr = (K * BITS + 31) // 32
    words = T[0] + n.to(tl.int64)[:, None] * NUM_WORDS
    codes = stream_codes(words, k, NUM_WORDS - 1, BITS)
    group = tl.load(T[3] + k)[None, :] if META[2] == 0 else (k // META[2])[None, :]
    place = group * N + n[:, None]
    scales = tl.load(T[1] + place).to(tl.float32)
    if KIND == 2:
        values = codes.to(tl.float32) * scales + tl.load(T[2] + place).to(tl.float32)
    elif KIND == 1:
        values = (codes - tl.load(T[2] + place).to(tl.int32)).to(tl.float32) * scales
    else:
        values = (codes - (1 << (BITS - 1))).to(tl.float32) * scales
    return values.to(DTYPE)


def affine_decode(weight: AffineWeight) -> TritonDecode:
    """The decoder of a weight in the layout of ``AffineWeight`` itself."""
    kind, beside = MIDDLE, weight.scales
    if weight.offsets is not None:
        kind, beside = OFFSET, weight.offsets
    elif weight.zeros is not None:
        kind, beside = INTEGER, weight.zeros
    is_regular = weight.group_offsets is None
    groups = weight.codes if is_regular else weight.group_ids().int()
    meta = (weight.bits, kind, weight.group_size if is_regular else 0)
    return TritonDecode(
        fn=decode_affine,
        tensors=(weight.codes, weight.scales, beside, groups),
        sections=((0, weight.in_features, meta),),
        tile=(1, 1),
    )
