"""How core's attention on CUDA reads and writes fp8 caches: keys [B, H, S, D], values [B, H, D, S].

The storage is uint8: Triton refuses e4m3 pointers below sm_89. There a few integer operations read
it; all cards write by integer operations, which are exact whatever the card.

``T``: codes, float32 [H] scales. ``META``: H, whether tokens are innermost, whether the card
converts e4m3, whether inline assembly can be used; for writing also whether keys are turned.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ingle.plugin.hadamard_triton import turn_tile

# Four e4m3 codes ($2) -> four fp16 numbers in $0, $1, each value / 256: sign and the other seven
# bits moved to where fp16 has them; the exponent bias differs by 8. Exact, subnormals included.
# Adding one to the seven bits of the NaN codes, 0x7f and 0xff, and of no other, carries into the
# byte's eighth, which becomes bit 14: set there, it makes the exponent that of NaN. All four bytes
# go through it at once: h holds the numbers' high bytes (sign, NaN, six bits), l the low ones.
E4M3_ASM = tl.constexpr(
    "{.reg .b32 h,l,n; and.b32 n,$2,0x7f7f7f7f; add.u32 n,n,0x01010101; shr.b32 n,n,1; "
    "shr.b32 h,$2,1; lop3.b32 h,h,n,0x40404040,0xD8; lop3.b32 h,$2,h,0x80808080,0xE4; "
    "shl.b32 l,$2,7; and.b32 l,l,0x80808080; prmt.b32 $0,l,h,0x5140; prmt.b32 $1,l,h,0x7362;}"
)


@triton.jit
def _place(storage, block, head, tok, dim, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr):
    base = storage + (block * META[0] + head) * (PAGE * D)
    # in this order the compiler keeps one address for a tile of keys
    return base + (dim * PAGE + tok) if META[1] else base + dim + tok.to(tl.int64) * D


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def decode_e4m3(codes, HARDWARE: tl.constexpr, ASM: tl.constexpr):
    """uint8 codes to fp16: the value with HARDWARE, else the value / 256."""
    if HARDWARE:
        out = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif ASM:
        out = tl.inline_asm_elementwise(
            E4M3_ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.uint16)
        rest = (wide & 0x7F) << 7
        rest |= (rest + 0x80) & 0x4000
        out = (((wide & 0x80) << 8) | rest).to(tl.float16, bitcast=True)
    return out


@triton.jit
def decode_e5m2(codes):
    """uint8 codes to fp16: a code is fp16's high byte."""
    return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr):
    """float32 to codes: nearest, ties to even, saturating; NaN becomes 0x7f.

    LARGEST is the largest finite number. SUBNORMAL is the number whose float32 neighbours are as
    far apart as the type's subnormals; adding it rounds to those.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    size = tl.minimum(magnitude.to(tl.float32, bitcast=True), LARGEST)
    # float32's exponent bias less the type's: 8-bit codes have 7 - MANTISSA bits of exponent
    bias: tl.constexpr = 127 - ((1 << (6 - MANTISSA)) - 1)
    held = size.to(tl.int32, bitcast=True)
    half: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = ((held + half + ((held >> SHIFT) & 1)) >> SHIFT) - (bias << MANTISSA)
    small = (size + SUBNORMAL).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(held < ((bias + 1) << 23), small, normal)
    return tl.where(is_nan, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def encode_e4m3(x):
    """float32 to uint8 codes."""
    return _encode(x, 3, 448.0, 16384.0)


@triton.jit
def encode_e5m2(x):
    """float32 to uint8 codes."""
    return _encode(x, 2, 57344.0, 128.0)


@triton.jit
def read_e4m3(
    T, block, head, tok, dim, mask,
    PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``KVCacheFormat.triton_read``."""
    codes = _load(_place(T[0], block, head, tok, dim, PAGE, D, META), mask)
    gain = tl.load(T[1] + head)
    if not META[2]:
        gain *= 256.0
    return decode_e4m3(codes, META[2], META[3]).to(DTYPE), gain


@triton.jit
def read_e5m2(
    T, block, head, tok, dim, mask,
    PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See ``KVCacheFormat.triton_read``."""
    codes = _load(_place(T[0], block, head, tok, dim, PAGE, D, META), mask)
    return decode_e5m2(codes).to(DTYPE), tl.load(T[1] + head)


@triton.jit
def _scaled(T, head, x, D: tl.constexpr, META: tl.constexpr):
    """``x`` turned if it is to be, and divided by the head's scale."""
    if META[4]:
        # compared, since Triton's minimum drops NaN
        x = tl.where(x > 1e30, 1e30, tl.where(x < -1e30, -1e30, x))
        x = turn_tile(x, D)
    return tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * tl.load(T[1] + head))


@triton.jit
def write_e4m3(
    T, block, head, tok, dim, x, mask, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr
):
    """See ``KVCacheFormat.triton_write``."""
    at = _place(T[0], block, head, tok, dim, PAGE, D, META)
    tl.store(at, encode_e4m3(_scaled(T, head, x, D, META)), mask=mask)


@triton.jit
def write_e5m2(
    T, block, head, tok, dim, x, mask, PAGE: tl.constexpr, D: tl.constexpr, META: tl.constexpr
):
    """See ``KVCacheFormat.triton_write``."""
    at = _place(T[0], block, head, tok, dim, PAGE, D, META)
    tl.store(at, encode_e5m2(_scaled(T, head, x, D, META)), mask=mask)
