"""``hadamard`` inside a Triton kernel. Imports triton."""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_tile(x, D: tl.constexpr):
    """float32 ``x`` [DP, N], 0 from row D on, to ``x.T @ hadamard(D)``, likewise [DP, N].

    The matrix is never formed: a butterfly for every power of two, each between rows whose numbers
    differ in one bit, so that D log D sums do. Their order is another than that of a product.
    D is at most 256.
    """
    PART: tl.constexpr = D & -D
    row = tl.arange(0, x.shape[0])[:, None]
    for bit in tl.static_range(0, 8):
        if (1 << bit) < PART:
            other = tl.gather(x, tl.broadcast_to(row ^ (1 << bit), x.shape), 0)
            x = tl.where((row & (1 << bit)) != 0, other - x, other + x)
    return x * (PART**-0.5)
