"""How attention on CUDA reads and writes the native cache: keys [B, H, S, D], values [B, H, D, S].

``META``: H, and whether tokens are innermost.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(block, head, tok, dim, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    """Where numbers lie in a storage of D numbers per token and head."""
    base = (block * META[0] + head) * (PAGE * D)
    return base + (dim * PAGE + tok) if META[1] else base + (tok * D + dim)


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
    tile = load_tile(T[0] + place(block, head, tok, dim, PAGE, D, META), mask)
    return tile.to(DTYPE), 1.0


@triton.jit
def write_native(
    T, block, head, tok, dim, x, mask, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr
):
    """See ``KVCacheFormat.triton_write``."""
    at = T[0] + place(block, head, tok, dim, PAGE, D, META)
    tl.store(at, x.to(T[0].dtype.element_ty), mask=mask)
