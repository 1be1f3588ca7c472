"""How attention on CUDA reads and writes the native cache: keys [B, H, S, D], values [B, H, D, S].

``META``: H, and whether tokens are innermost.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(storage, block, head, tok, dim, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    """Pointers to numbers in a storage of D numbers per token and head.

    Added up so that the compiler keeps one address per tile of keys and finds the other tokens'
    at fixed distances from it (docs/benchmarks.md: a tenth of the instructions).
    """
    base = storage + (block * META[0] + head) * (PAGE * D)
    return base + (dim * PAGE + tok) if META[1] else base + dim + tok.to(tl.int64) * D


@triton.jit
def load_tile(pointers, mask):
    """What is there, and 0 where masked; ``mask`` may be None."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def read_native(
    T, block, head, tok, dim, mask,
    PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``KVCacheFormat.triton_read``."""
    tile = load_tile(place(T[0], block, head, tok, dim, PAGE, D, META), mask)
    return tile.to(DTYPE), 1.0


@triton.jit
def write_native(
    T, block, head, tok, dim, x, mask, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr
):
    """See ``KVCacheFormat.triton_write``."""
    at = place(T[0], block, head, tok, dim, PAGE, D, META)
    tl.store(at, x.to(T[0].dtype.element_ty), mask=mask)
