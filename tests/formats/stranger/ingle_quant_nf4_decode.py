"""The decode function: all that a stranger writes to have core's products on a card."""

# Triton functions take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_nf4(T, n, k, N: tl.constexpr, K: tl.constexpr, META: tl.constexpr, DTYPE):
    """``codebook[code] * absmax``: [BN, BK]. META: the block."""
    pairs = tl.load(T[0] + (n * (K // 2))[:, None] + (k // 2)[None, :]).to(tl.int32)
    codes = (pairs >> (k % 2 * 4)[None, :]) & 15
    largest = tl.load(T[1] + (n * (K // META[0]))[:, None] + (k // META[0])[None, :])
    return (tl.load(T[2] + codes) * largest.to(tl.float32)).to(DTYPE)
