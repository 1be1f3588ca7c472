"""How attention on CUDA reads and writes integer caches.

    codes   keys [B, H, S, C], values [B, H, C, S]
    scales  [B, H, S, G], in the activation dtype
    int4    byte j of a row holds value j in its low half and value D / 2 + j in its high half

``META``: H, whether tokens are innermost, G, whether inline assembly can be used.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ingle.builtin.kv_native_triton import load_tile, place

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it to a small float32 rounds that to a whole number, ties to even."""


# Four int8 codes ($2) -> four fp16 numbers in $0, $1: 0x6400 + n is 1024 + n, so a byte with its
# sign bit turned over, put into the low byte of 0x64.., is 1152 more than the code.
INT8_ASM = tl.constexpr(
    "{.reg .b32 x,b,h,m; xor.b32 x,$2,0x80808080; mov.b32 h,0x64646464; mov.b32 m,0x64806480; "
    "prmt.b32 b,x,h,0x4140; sub.rn.f16x2 $0,b,m; "
    "prmt.b32 b,x,h,0x4342; sub.rn.f16x2 $1,b,m;}"
)


@triton.jit
def _whole(x):
    """``x``, float32 and small, rounded to nearest even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _quotient(x, scale):
    """``x / scale`` rounded; 0 where there is nothing to divide by or the quotient is NaN."""
    codes = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return _whole(tl.where((scale == 0) | (codes != codes), 0.0, codes))


@triton.jit
def read_int8(
    T, block, head, tok, dim, mask,
    PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``KVCacheFormat.triton_read``. Keys leave their scale to the logits."""
    codes = load_tile(place(T[0], block, head, tok, dim, PAGE, D, META), mask)
    scale = tl.load(T[1] + ((block * META[0] + head) * PAGE + tok))
    if META[3]:
        tile = tl.inline_asm_elementwise(
            INT8_ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        ).to(DTYPE)
    else:
        tile = codes.to(DTYPE)
    if META[1]:
        tile = tile * scale.to(DTYPE)
        gain = 1.0
    else:
        gain = scale.to(tl.float32)
    return tile, gain


@triton.jit
def write_int8(
    T, block, head, tok, dim, x, mask, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr
):
    """See ``KVCacheFormat.triton_write``."""
    scale = tl.div_rn(tl.max(tl.abs(x), 0), tl.full((x.shape[1],), 127.0, tl.float32))
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    scale = tl.where(has_nan, float("nan"), scale).to(T[1].dtype.element_ty)[None, :]
    codes = _quotient(x, scale.to(tl.float32))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
    tl.store(place(T[0], block, head, tok, dim, PAGE, D, META), codes, mask=mask)
    is_stored = tl.max(mask.to(tl.int32), 0)[None, :] > 0
    tl.store(T[1] + ((block * META[0] + head) * PAGE + tok), scale, mask=is_stored)


@triton.jit
def _group_places(block, head, tok, GP: tl.constexpr, PAGE: tl.constexpr, META: tl.constexpr):
    """Where the scales of tokens lie, [GP, N], and which of them there are, [GP, 1]."""
    group = tl.arange(0, GP)[:, None]
    at = ((block * META[0] + head) * PAGE + tok) * META[2] + group
    return at, group < META[2]


@triton.jit
def read_int4(
    T, block, head, tok, dim, mask,
    PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``KVCacheFormat.triton_read``."""
    HALF: tl.constexpr = D // 2
    DP: tl.constexpr = dim.shape[0]
    N: tl.constexpr = tok.shape[1]
    GP: tl.constexpr = DP * META[2] // D  # groups that the padded row has room for
    high = dim >= HALF
    byte = tl.where(high, dim - HALF, dim)
    packed = load_tile(place(T[0], block, head, tok, byte, PAGE, HALF, META), mask)
    code = tl.where(high, packed >> 4, packed & 15).to(tl.uint16)
    if tl.float16 == DTYPE:
        tile = (code | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        tile = (code.to(tl.int16) - 8).to(DTYPE)
    at, is_there = _group_places(block, head, tok, GP, PAGE, META)
    scales = tl.load(T[1] + at, mask=is_there, other=0.0).to(DTYPE)
    groups = tl.reshape(tile, (GP, DP // GP, N)) * scales[:, None, :]
    return tl.reshape(groups, (DP, N)), 1.0


@triton.jit
def write_int4(
    T, block, head, tok, dim, x, mask, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr
):
    """See ``KVCacheFormat.triton_write``."""
    HALF: tl.constexpr = D // 2
    DP: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    GP: tl.constexpr = DP * META[2] // D
    groups = tl.reshape(x, (GP, DP // GP, N))
    low, high = tl.min(groups, 1), tl.max(groups, 1)
    has_nan = tl.max((groups != groups).to(tl.int32), 1) > 0
    scale = tl.where(-low > high, low, high) * -0.125
    scale = tl.where(has_nan, float("nan"), scale).to(T[1].dtype.element_ty)
    codes = _quotient(groups, scale.to(tl.float32)[:, None, :]) + 8.0
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
    codes = tl.reshape(codes, (DP, N))
    byte = tl.arange(0, DP)[:, None]
    other = tl.broadcast_to(tl.minimum(byte + HALF, DP - 1), (DP, N))
    packed = codes | (tl.gather(codes, other, 0) << 4)
    is_stored = tl.max(mask.to(tl.int32), 0)[None, :] > 0
    at = place(T[0], block, head, tok, byte, PAGE, HALF, META)
    tl.store(at, packed.to(tl.uint8), mask=(byte < HALF) & is_stored)
    at, is_there = _group_places(block, head, tok, GP, PAGE, META)
    tl.store(T[1] + at, scale, mask=is_there & is_stored)
