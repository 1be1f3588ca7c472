"""EXL2 weights (2, 3, 4, 5, 6 or 8 bits, mixed along K) times a few rows, on CUDA through Triton.

Shape letters: M rows of activations (1..32), N output features, K input features in
*quantised-row order* (the caller gathers ``x[:, perm]``). The memory layout, and why it is what it
is, stands at the top of ``planes.py``. One launch serves all bit widths of a matrix: a program
looks up in ``work`` which chunks it multiplies and branches to the code for their width.

The split-K tail is written out here, not imported: plugins may import only ``ingle.plugin``.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ingle_quant_exl2.planes import PLANES, PackedExl2, dequantize_exl2, kinds

MAX_ROWS = 32
MAX_TILES = 1 << 14
FEW_KINDS = 3
"""Pairs of width and group size in a matrix, of which the assembler makes a kernel by itself."""
COUNTER_BYTES = 1 << 16
"""Size of the counter region at the start of a workspace; the same as core's kernels use."""
_MOST_AT_ONCE = tl.constexpr(8192)
"""Partial sums that a program reads before it adds them: more do not fit a warp's registers."""


def _half_twice(value: float) -> str:
    """``value`` as fp16, in both halves of a 32-bit register."""
    return f"{struct.unpack('<H', struct.pack('<e', value))[0] * 0x10001:#010x}"


def _shift(register: str, source: str, right: int) -> str:
    return f"{'shr' if right > 0 else 'shl'}.b32 {register},{source},{abs(right)};"


def _field_asm(bits: int, v: int) -> str:
    """PTX for field ``v`` of two packed words: two fp16 values ``q - 2^(bits - 1)``.

    $1: low-plane words; $2: high-plane words. A field may stay at bit ``position`` of its 16-bit
    half as long as it ends below bit 10, fp16's mantissa: 0x6400 | q << position is 1024 +
    q * 2^position, and the fma takes both constants out again. Otherwise it is shifted first.
    """
    low, high = PLANES[bits]
    offset = v * low % 16
    position = offset
    if offset + low + high > 10:
        position = offset - 8 if offset >= 8 and offset - 8 + low + high <= 10 else 0
    code, source = [], "$1"
    if offset != position:
        code.append(_shift("t", "$1", offset - position))
        source = "t"
    mask = (((1 << low) - 1) << position) * 0x10001
    code.append(f"lop3.b32 t,{source},{mask:#010x},0x64006400,0xEA;")
    if high:
        right, source = v * high % 16 - (position + low), "$2"
        if right:
            code.append(_shift("h", "$2", right))
            source = "h"
        mask = (((1 << high) - 1) << (position + low)) * 0x10001
        code.append(f"lop3.b32 t,{source},{mask:#010x},t,0xEA;")
    offset_out = -(1024.0 / 2**position + 2 ** (bits - 1))
    code.append(f"mov.b32 m,{_half_twice(2.0**-position)};")
    code.append(f"mov.b32 c,{_half_twice(offset_out)}; fma.rn.f16x2 $0,t,m,c;")
    return "{.reg .b32 t,h,m,c; " + " ".join(code) + "}"


# indexed by bits * 16 + v; Triton's constants may be tuples of strings, but not of tuples
FIELD_ASM = tl.constexpr(
    tuple(_field_asm(bits, v) if bits in PLANES else "" for bits in range(9) for v in range(16))
)
_LOW = tl.constexpr(tuple(PLANES.get(bits, (0, 0))[0] for bits in range(9)))
_HIGH = tl.constexpr(tuple(PLANES.get(bits, (0, 0))[1] for bits in range(9)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl2Config:
    """How one product is launched; the split along K is the weight's own (``plan_splits``).

    Attributes:
        block_n: Output features per program (one warp): 16, which is 32 for more than 16 rows,
            32 or 64.
        num_stages: Triton's: 1 keeps loads in registers, more go through shared memory with
            cp.async (12 to 25 KB a program, so few programs fit an SM).
    """

    block_n: int = 32
    num_stages: int = 1


def default_splits(packed: PackedExl2, num_sms: int = 128) -> int:
    """Programs along K that give a card about 16 one-warp programs per SM."""
    tiles = packed.words.shape[0] // 2
    chunks = sum(s.chunks for s in packed.sections)
    return max(len(packed.sections), min(16, 16 * num_sms // max(1, tiles), chunks))


def most_registers(num_kinds: int, rows: int) -> int | None:
    """A thread's registers to ask the assembler for, or None for its own choice: left to itself it
    holds a kernel of many kinds for up to 8 rows to 96 or 128 and spills a few; asked for all in
    one for more rows it spills."""
    return 255 if num_kinds > FEW_KINDS and rows <= 8 else None


def exl2_workspace_bytes(packed: PackedExl2, rows: int) -> int:
    """Bytes of zeroed workspace ``matmul_exl2`` needs for up to ``rows`` rows."""
    if packed.splits == 1:
        return 0
    return COUNTER_BYTES + 4 * rows * packed.out_features * packed.splits


@triton.jit
def _fragment(ptr, needed):
    """One block per 16-row tile as [BN, 16] words; nothing is read where ``needed`` is false."""
    raw = tl.load(ptr, mask=needed, other=0, eviction_policy="evict_first")
    # tile, g, t, k8, row8, k1 -> (tile, row8, g) x (k8, t, k1)
    raw = tl.permute(tl.reshape(raw, (ptr.shape[0] // 256, 8, 4, 2, 2, 2)), (0, 4, 1, 3, 2, 5))
    return tl.reshape(raw, (ptr.shape[0] // 16, 16))


@triton.jit
def _decode_field(low, high, BITS: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr):
    """Words of both planes -> field V minus 2^(BITS-1), exact in fp16."""
    LW: tl.constexpr = _LOW[BITS]
    HW: tl.constexpr = _HIGH[BITS]
    if ASM:
        CODE: tl.constexpr = FIELD_ASM[BITS * 16 + V]
        if HW > 0:
            w = tl.inline_asm_elementwise(
                CODE, "=r,r,r", [low, high], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            w = tl.inline_asm_elementwise(
                CODE, "=r,r", [low], dtype=tl.float16, is_pure=True, pack=2
            )
    else:
        q = (low.to(tl.int32) >> (V * LW % 16)) & ((1 << LW) - 1)
        if HW > 0:
            q = q | (((high.to(tl.int32) >> (V * HW % 16)) & ((1 << HW) - 1)) << LW)
        w = (q - (1 << (BITS - 1))).to(tl.float16)
    return w


@triton.jit
def _group_scales(scale_codes, group_scale, group, needed, rn, NP: tl.constexpr):
    """(s + 1)^2 * group_scale as fp32 [BN]; 0 where ``needed`` is false."""
    byte = tl.load(
        scale_codes + group * (NP // 2) + rn // 16 * 8 + rn % 8, mask=needed, other=0
    ).to(tl.int32)
    # fp32's mantissa in place of a shift and a conversion: 0x4B000000 | s is 2^23 + s, and a code
    # that stays four bits higher counts sixteen times in 0x49000000 | 16 s, which is 2^19 + s
    high = rn // 8 % 2 == 1
    bits = (byte & tl.where(high, 0xF0, 0x0F)) | tl.where(high, 0x49000000, 0x4B000000)
    root = bits.to(tl.float32, bitcast=True) - tl.where(high, 524287.0, 8388607.0)
    square = root * root
    return square * tl.load(group_scale + group, mask=needed, other=0.0)


@triton.jit
def _section_product(
    x_ptr, x_row, word_ptr, scale_codes, group_scale, rn, chunks, k0, k1, group0,
    NP: tl.constexpr, BM: tl.constexpr, BITS: tl.constexpr, GS: tl.constexpr,
    BF16: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums ``chunks`` chunks of one section; ``word_ptr`` and ``k0`` are at the first of them."""
    LW: tl.constexpr = _LOW[BITS]
    HW: tl.constexpr = _HIGH[BITS]
    BN: tl.constexpr = rn.shape[0]
    acc = tl.zeros((BN, BM), tl.float32)
    for c in tl.range(0, chunks):
        fields = tl.minimum((k1 - k0 - c * 256) // 16, 16)  # of this chunk, fewer in a tail
        base = word_ptr + c * (BITS * 256)
        high_base = base + tl.minimum((fields * LW + 15) // 16, LW) * 256
        part = tl.zeros((BN, BM), tl.float32)
        for v in tl.static_range(16):
            if v % 2 == 0:
                xv = tl.load(x_ptr + k0 + c * 256 + v * 16, mask=x_row & (fields > v), other=0.0)
                # m, t, v % 2, k8, k1 -> (k8, t, k1), m, v % 2
                xv = tl.permute(tl.reshape(xv, (BM, 4, 2, 2, 2)), (3, 1, 4, 0, 2))
                x0, x1 = tl.split(tl.reshape(xv, (16, BM, 2)))
            if v * LW % 16 == 0:
                low = _fragment(base + v * LW // 16 * 256, fields > v)
            if HW > 0:
                if v * HW % 16 == 0:
                    high = _fragment(high_base + v * HW // 16 * 256, fields > v)
            else:
                high = low
            w = _decode_field(low, high, BITS, v, ASM)
            if BF16:
                w = w.to(tl.bfloat16)
            part = tl.dot(w, x0 if v % 2 == 0 else x1, part)
            if (v + 1) * 16 % GS == 0:
                group = group0 + c * (256 // GS) + v * 16 // GS
                any_field = fields > v + 1 - GS // 16
                scale = _group_scales(scale_codes, group_scale, group, any_field, rn, NP)
                acc += scale[:, None] * part
                part = tl.zeros((BN, BM), tl.float32)
    return acc


@triton.jit(do_not_specialize=["M"])
def exl2_decode_kernel(
    x, words, scale_codes, group_scale, work, out, residual, partials, counters, M,
    N: tl.constexpr, NP: tl.constexpr, BLOCKS: tl.constexpr, KINDS: tl.constexpr,
    X_STRIDE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One warp: BN features of one row of ``work``. Grid (NP / BN, SPLITS).

    NP: padded N. BLOCKS: blocks of a row tile. KINDS: ((bits, group size), ...).
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    item = work + split * 8
    kind = tl.load(item)
    block = tl.load(item + 1)
    chunks = tl.load(item + 2)
    k0 = tl.multiple_of(tl.load(item + 3), 32)
    k1 = tl.load(item + 4)
    group0 = tl.load(item + 5)
    rn = tile * BN + tl.arange(0, BN)
    rm = tl.arange(0, BM)
    wi = tl.arange(0, BN * 16)
    strip = (tile * (BN // 16) + wi // 256).to(tl.int64) * (BLOCKS * 256)
    word_ptr = words + strip + wi % 256 + block * 256
    xi = tl.arange(0, BM * 32)
    x_ptr = x + xi // 32 * X_STRIDE + xi % 32
    x_row = xi // 32 < M
    acc = tl.zeros((BN, BM), tl.float32)
    for i in tl.static_range(len(KINDS)):
        if kind == i:
            acc = _section_product(
                x_ptr, x_row, word_ptr, scale_codes, group_scale, rn, chunks, k0, k1, group0,
                NP, BM, KINDS[i][0], KINDS[i][1], BF16, ASM,
            )  # fmt: skip
    _finish(acc, out, residual, partials, counters, tile, split, rn, rm, M, N, SPLITS, HAS_RESIDUAL)


@triton.jit
def _finish(
    acc, out, residual, partials, counters, tile, split, rn, rm, M,
    N: tl.constexpr, SPLITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The last program of a tile adds all partials in index order and clears the counter."""
    mask = (rn < N)[:, None] & (rm < M)[None, :]
    offsets = rm[None, :] * N + rn[:, None]
    arrived = SPLITS - 1
    if SPLITS > 1:
        tl.store(partials + split * M * N + offsets, acc, mask=mask, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's store before the one thread's atomic releases them
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        total = acc
        if SPLITS > 1:
            total = tl.zeros_like(acc)
            ONE: tl.constexpr = rn.shape[0] * rm.shape[0]
            if SPLITS * ONE <= _MOST_AT_ONCE:
                for i in tl.static_range(SPLITS):
                    part = partials + i * M * N + offsets
                    total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            else:
                for i in tl.range(0, SPLITS, loop_unroll_factor=_MOST_AT_ONCE // ONE):
                    part = partials + i * M * N + offsets
                    total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            tl.atomic_xchg(counters + tile, 0, sem="relaxed")
        if HAS_RESIDUAL:
            total += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def matmul_exl2_reference(
    x: torch.Tensor, packed: PackedExl2, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [M, K] @ W.T (+ residual)`` as fp32 [M, N], computed in fp32; the kernel's oracle."""
    y = x.float() @ dequantize_exl2(packed).T
    return y if residual is None else y + residual.float()


def _check_product(x: torch.Tensor, packed: PackedExl2, out: torch.Tensor) -> None:
    rows, k = x.shape
    if k != packed.in_features:
        raise ValueError(f"x has {k} features, the weight {packed.in_features}")
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows, the kernel serves 1..{MAX_ROWS}: dequantise and multiply")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x is {x.dtype}, must be float16 or bfloat16: convert the model")
    if x.device != packed.words.device:
        raise ValueError(f"x is on {x.device}, the weight on {packed.words.device}")
    if not x.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(f"x is on {x.device}, Triton needs CUDA: use the fallback")
    if tuple(out.shape) != (rows, packed.out_features) or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()}, must be contiguous "
            f"({rows}, {packed.out_features})"
        )


def _workspace_views(
    workspace: torch.Tensor | None, needed: int, tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace as (int32 counters, fp32 partials)."""
    if workspace is None or workspace.dtype != torch.uint8 or workspace.numel() < needed:
        got = "None" if workspace is None else f"{workspace.dtype} {tuple(workspace.shape)}"
        raise ValueError(f"workspace is {got}: pass {needed} zeroed bytes as uint8")
    if tiles > MAX_TILES:
        raise ValueError(f"{tiles} output tiles, at most {MAX_TILES}: use a larger block_n")
    return (
        workspace[:COUNTER_BYTES].view(torch.int32),
        workspace[COUNTER_BYTES:needed].view(torch.float32),
    )


def matmul_exl2(
    x: torch.Tensor,
    packed: PackedExl2,
    config: Exl2Config,
    *,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out [M, N] = x [M, K] @ W.T (+ residual [M, N])``; deterministic, CUDA-graph safe.

    Args:
        x: fp16 or bf16, K in quantised-row order.
        workspace: uint8 of ``exl2_workspace_bytes``; zeroed once, counters are left at zero.
    """
    _check_product(x, packed, out)
    rows = x.shape[0]
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # the kernel loads 16 bytes at a time
    tiles, blocks = packed.words.shape[:2]
    # 16 features times 32 rows of many kinds do not fit a warp's registers; 32 features do
    block_n = max(config.block_n, 32) if rows > 16 else config.block_n
    grid = (tiles * 16 // block_n, packed.splits)
    counters, partials = out, out  # never touched without a split
    if packed.splits > 1:
        needed = exl2_workspace_bytes(packed, rows)
        counters, partials = _workspace_views(workspace, needed, grid[0])
    kinds_of = kinds(packed.sections)
    exl2_decode_kernel[grid](
        x, packed.words, packed.scale_codes, packed.group_scale, packed.work,
        out, residual, partials, counters, rows,
        N=packed.out_features, NP=tiles * 16, BLOCKS=blocks, KINDS=kinds_of,
        X_STRIDE=x.stride(0), BN=block_n, BM=max(8, triton.next_power_of_2(rows)),
        SPLITS=packed.splits, HAS_RESIDUAL=residual is not None, BF16=x.dtype == torch.bfloat16,
        ASM=x.is_cuda and torch.version.cuda is not None, num_warps=1, num_stages=config.num_stages,
        maxnreg=most_registers(len(kinds_of), rows),
    )  # fmt: skip
    return out
