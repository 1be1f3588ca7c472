"""4-bit affine weights (AWQ, GPTQ) times a few rows of activations, on CUDA through Triton.

Shape letters: M rows of activations (1..32), N output features, K input features, G groups along
K, C = K/128 chunks. N and K are padded to multiples of 64 and 128 when packed.

The kernel is bound by memory, so it must spend few instructions per weight. Weights are the *A*
operand of ``mma.m16n8k16`` and the activations the *B* operand with n = 8, so 1..8 rows cost the
same. Weights are stored in the very order in which a lane needs them: one 16-byte load *is* the
fragment, and neither shared memory nor a barrier is in the loop (about 2 instructions a weight).

Layout of ``words``, int16 [N/16, C, kt 2, lane 32, 8], lane = 4 g + t, element = (k8, row8, k1):

    row of the word     tile * 16 + row8 * 8 + g
    nibble j, 0..3      k = chunk * 128 + j * 32 + t * 8 + kt * 4 + k8 * 2 + k1

The product sums over k, so any order of k will do if activations follow it: this one makes the
eight values a lane needs for one j contiguous in a row of ``x`` (one 16-byte load, no shuffle).

Source of the bit trick: 0x6400 | q is the fp16 number 1024 + q (FasterTransformer, AWQ kernels);
bf16 has 0x4300 | q = 128 + q. Codes minus zero are exact integers in both.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ingle.builtin.split_k_triton import (
    finish_split_k,
    split_k_views,
    split_k_workspace_bytes,
)

MAX_ROWS = 32
CHUNK = 128
_N_MULTIPLE = 64

# Nibble j of two packed 16-bit words ($1) minus the zero ($2), two values to a 32-bit register.
# fp16: $2 = 1024 + zero for even j; for odd j the nibble stays where it is (1024 + 16 q), is scaled
# by 1/16, and $2 = 64 + zero. bf16: $2 = -(128 + zero); sub.bf16x2 is sm_90+, hence the fma.
_HALF_EVEN = (
    "{{.reg .b32 t; {src} lop3.b32 t,{reg},0x000f000f,0x64006400,0xEA; sub.rn.f16x2 $0,t,$2;}}"
)
_HALF_ODD = (
    "{{.reg .b32 t,o,n; mov.b32 o,0x2c002c00; {src} lop3.b32 t,{reg},0x00f000f0,0x64006400,0xEA; "
    "neg.f16x2 n,$2; fma.rn.f16x2 $0,t,o,n;}}"
)
_BFLOAT = (
    "{{.reg .b32 t,o; mov.b32 o,0x3f803f80; {src} lop3.b32 t,{reg},0x000f000f,0x43004300,0xEA; "
    "fma.rn.bf16x2 $0,t,o,$2;}}"
)


def _nibble_asm(template: str, shift: int) -> str:
    if shift == 0:
        return template.format(src="", reg="$1")
    return template.format(src=f"shr.b32 t,$1,{shift};", reg="t")


NIBBLE_ASM_FP16 = tl.constexpr(
    tuple(_nibble_asm(_HALF_ODD if j % 2 else _HALF_EVEN, j // 2 * 8) for j in range(4))
)
NIBBLE_ASM_BF16 = tl.constexpr(tuple(_nibble_asm(_BFLOAT, 4 * j) for j in range(4)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedW4:
    """A 4-bit weight in the kernel's order; see the top of the file.

    Attributes:
        words: int16 [N'/16, C, 2, 32, 8], N' and C after padding.
        scales: [G', N'], fp16, bf16 or fp32; zero where padded.
        zeros: fp16 [G', N'], integers 0..16, or None: every zero is 8.
        out_features: N before padding.
        in_features: K before padding.
        group_size: k's that share a scale: 32, 64, a multiple of 128, or K.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    out_features: int
    in_features: int
    group_size: int

    @property
    def padded(self) -> tuple[int, int]:
        """(N', K') after padding."""
        return self.words.shape[0] * 16, self.words.shape[1] * CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Config:
    """How one product is launched.

    Attributes:
        block_n: Output features per program (one warp): 16, 32 or 64, which is 32 for more than
            8 rows.
        splits: Programs that share a tile along K.
        prefetch: Load the next chunk's weights before computing on this one's.
        num_stages: Triton's: 1 keeps loads in registers, more stages activations (and, without
            prefetch, weights) through shared memory with cp.async.
    """

    block_n: int = 32
    splits: int = 1
    prefetch: bool = True
    num_stages: int = 1


def check_w4(shape: tuple[int, int], group_size: int) -> None:
    """Raises ``ValueError`` when the kernel cannot serve a weight of shape [N, K]."""
    n, k = shape
    if k % 32:
        raise ValueError(f"in_features is {k}, must be a multiple of 32: use the dense fallback")
    if n < 1:
        raise ValueError(f"out_features is {n}, must be positive")
    if group_size not in (32, 64) and group_size % CHUNK and group_size != k:
        raise ValueError(
            f"group size {group_size} is not 32, 64, a multiple of 128 or in_features ({k}): "
            "use the dense fallback"
        )


def _pad_groups(table: torch.Tensor, groups: int, n: int) -> torch.Tensor:
    """[G, N] -> [groups, n], new entries zero."""
    out = table.new_zeros(groups, n)
    out[: table.shape[0], : table.shape[1]] = table
    return out


def pack_w4(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> PackedW4:
    """Packs a weight ``W[n, k] = (codes[n, k] - zeros[g, n]) * scales[g, n]``, g = k // group_size.

    Args:
        codes: integers 0..15, [N, K], any integer dtype, any device.
        scales: [G, N], floating.
        zeros: [G, N], integer values 0..16 of any dtype, or None for 8 throughout.
        group_size: see ``PackedW4``.
    """
    n, k = codes.shape
    check_w4((n, k), group_size)
    groups = -(-k // group_size)
    for name, table in (("scales", scales), ("zeros", zeros)):
        if table is not None and tuple(table.shape) != (groups, n):
            raise ValueError(f"{name} is {tuple(table.shape)}, must be [G, N] = ({groups}, {n})")
    if zeros is not None and not torch.equal(zeros.float().round().clamp(0, 16), zeros.float()):
        raise ValueError(
            f"zeros between {zeros.min().item()} and {zeros.max().item()} must be integers 0..16: "
            "use the dense fallback for float offsets"
        )
    pad_n, pad_k = -(-n // _N_MULTIPLE) * _N_MULTIPLE, -(-k // CHUNK) * CHUNK
    padded = torch.zeros(pad_n, pad_k, dtype=torch.int32, device=codes.device)
    padded[:n, :k] = codes
    pad_g = -(-pad_k // group_size)
    return PackedW4(
        words=_codes_to_words(padded),
        scales=_pad_groups(scales, pad_g, pad_n),
        zeros=None if zeros is None else _pad_groups(zeros.to(torch.float16), pad_g, pad_n),
        out_features=n,
        in_features=k,
        group_size=group_size,
    )


def _codes_to_words(codes: torch.Tensor) -> torch.Tensor:
    """int32 [N', K'] -> int16 words; N' % 16 == 0, K' % 128 == 0."""
    n, k = codes.shape
    v = codes.view(n, k // CHUNK, 4, 32)
    word = v[:, :, 0] | v[:, :, 1] << 4 | v[:, :, 2] << 8 | v[:, :, 3] << 12
    word = torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)
    # tile, row8, g, chunk, t, kt, k8, k1 -> tile, chunk, kt, g, t, k8, row8, k1
    word = word.view(n // 16, 2, 8, k // CHUNK, 4, 2, 2, 2).permute(0, 3, 5, 2, 4, 6, 1, 7)
    return word.reshape(n // 16, k // CHUNK, 2, 32, 8).contiguous()


def _words_to_codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_codes_to_words``."""
    tiles, chunks = words.shape[:2]
    word = words.view(tiles, chunks, 2, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 4, 2, 5, 7)
    word = word.reshape(tiles * 16, chunks, 1, 32).to(torch.int32)
    shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32).view(1, 1, 4, 1)
    return ((word >> shifts) & 15).reshape(tiles * 16, chunks * CHUNK)


def dequantize_w4(packed: PackedW4) -> torch.Tensor:
    """The weight as fp32 [N, K]; plain torch."""
    n, k, size = packed.out_features, packed.in_features, packed.group_size
    codes = _words_to_codes(packed.words)[:n, :k].float()
    zeros = 8.0 if packed.zeros is None else _per_weight(packed.zeros, n, k, size)
    return (codes - zeros) * _per_weight(packed.scales, n, k, size)


def _per_weight(table: torch.Tensor, n: int, k: int, group_size: int) -> torch.Tensor:
    """[G', N'] -> fp32 [n, k]."""
    return table[:, :n].float().T.repeat_interleave(group_size, 1)[:, :k]


def matmul_w4_reference(
    x: torch.Tensor, packed: PackedW4, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [M, K] @ W.T (+ residual)`` as fp32 [M, N], computed in fp32; the kernel's oracle."""
    y = x.float() @ dequantize_w4(packed).T
    return y if residual is None else y + residual.float()


def default_w4_config(packed: PackedW4, num_sms: int = 128) -> W4Config:
    """A launch that fills the card: about 16 one-warp programs per SM, 4 chunks or more each."""
    n, k = packed.padded
    block_n = 32 if n >= 2048 else 16
    splits = max(1, min(16, 16 * num_sms // (n // block_n), k // CHUNK // 4))
    # small groups keep more scales and zeros in registers: prefetching as well would spill
    return W4Config(block_n=block_n, splits=splits, prefetch=packed.group_size >= CHUNK)


def w4_workspace_bytes(packed: PackedW4, rows: int, config: W4Config) -> int:
    """Bytes of zeroed workspace ``matmul_w4`` needs for up to ``rows`` rows."""
    return split_k_workspace_bytes(rows, packed.out_features, config.splits)


@triton.jit
def _nibble_minus_zero(words, zero, J: tl.constexpr, ASM: tl.constexpr, BF16: tl.constexpr):
    """int16 words -> nibble J minus zero, fp16 or bf16; ``zero`` biased as said at the top."""
    if ASM:
        if BF16:
            w = tl.inline_asm_elementwise(
                NIBBLE_ASM_BF16[J], "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            w = tl.inline_asm_elementwise(
                NIBBLE_ASM_FP16[J], "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2
            )
    elif BF16:
        w = (((words >> (4 * J)) & 0xF) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        w = (w.to(tl.float32) + zero.to(tl.float32)).to(tl.bfloat16)
    elif J % 2 == 0:
        w = (((words >> (4 * J)) & 0xF) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - zero
    else:
        w = (((words >> (4 * J - 4)) & 0xF0) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        w = w * 0.0625 - zero
    return w


@triton.jit
def _biased_zero(zeros, offsets, ODD: tl.constexpr, BF16: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """The zero plus the magic number, per output feature, in the activation dtype: [BN, 1]."""
    z = tl.full(offsets.shape, 8.0, tl.float16)
    if HAS_ZEROS:
        z = tl.load(zeros + offsets)
    if BF16:
        z = (-(z.to(tl.float32) + 128.0)).to(tl.bfloat16)
    elif ODD:
        z = z + 64.0
    else:
        z = z + 1024.0
    return z[:, None]


@triton.jit(do_not_specialize=["M"])
def w4_decode_kernel(
    x, words, scales, zeros, out, residual, partials, counters, M,
    N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, GS: tl.constexpr,
    X_STRIDE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BF16: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One warp: BN features of one split. Grid (NP / BN, SPLITS). NP: padded N; GS: group size."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = split * CHUNKS // SPLITS
    last = (split + 1) * CHUNKS // SPLITS
    rn = tile * BN + tl.arange(0, BN)
    rm = tl.arange(0, BM)
    # weights: BN/16 strips of 512 words, each the fragments of a 16 x 128 block
    wi = tl.arange(0, BN * 32)
    strip = (tile * (BN // 16) + wi // 512).to(tl.int64) * (CHUNKS * 512)
    word_ptr = words + strip + wi % 512
    # activations: lane (m, t) takes the 8 contiguous values t * 8 .. of row m
    xi = tl.arange(0, BM * 32)
    xk = xi % 32
    x_ptr = x + xi // 32 * X_STRIDE + xk
    x_row = xi // 32 < M
    acc = tl.zeros((BN, BM), tl.float32)
    if PREFETCH:
        following = tl.load(word_ptr + first * 512, eviction_policy="evict_first")
    for c in tl.range(first, last):
        if PREFETCH:
            raw = following
            ahead = tl.minimum(c + 1, last - 1) * 512
            following = tl.load(word_ptr + ahead, eviction_policy="evict_first")
        else:
            raw = tl.load(word_ptr + c * 512, eviction_policy="evict_first")
        # tile, kt, g, t, k8, row8, k1 -> (tile, row8, g) x (kt, k8, t, k1)
        frag = tl.permute(tl.reshape(raw, (BN // 16, 2, 8, 4, 2, 2, 2)), (0, 5, 2, 1, 4, 3, 6))
        frag = tl.reshape(frag, (BN, 32))
        part = tl.zeros((BN, BM), tl.float32)
        if GS >= 128:
            offsets = (c * 128 // GS) * NP + rn
            even = _biased_zero(zeros, offsets, False, BF16, HAS_ZEROS)
            odd = _biased_zero(zeros, offsets, True, BF16, HAS_ZEROS)
        for j in tl.static_range(4):
            if GS < 128 and j * 32 % GS == 0:
                offsets = ((c * 128 + j * 32) // GS) * NP + rn
                even = _biased_zero(zeros, offsets, False, BF16, HAS_ZEROS)
                odd = _biased_zero(zeros, offsets, True, BF16, HAS_ZEROS)
            x_mask = x_row
            if K % 128 != 0:
                x_mask = x_row & (c * 128 + j * 32 + xk < K)
            xv = tl.load(x_ptr + c * 128 + j * 32, mask=x_mask, other=0.0)
            # m, t, kt, k8, k1 -> (kt, k8, t, k1) x m
            xv = tl.permute(tl.reshape(xv, (BM, 4, 2, 2, 2)), (2, 3, 1, 4, 0))
            xv = tl.reshape(xv, (32, BM))
            if j % 2 == 0:
                w = _nibble_minus_zero(frag, even, j, ASM, BF16)
            else:
                w = _nibble_minus_zero(frag, odd, j, ASM, BF16)
            part = tl.dot(w, xv, part)
            if j == 3 or (GS < 128 and (j + 1) * 32 % GS == 0):
                acc += tl.load(scales + offsets).to(tl.float32)[:, None] * part
                part = tl.zeros((BN, BM), tl.float32)
    finish_split_k(
        acc, out, residual, partials, counters, tile, split, rn, rm, M, N, SPLITS, HAS_RESIDUAL
    )


def _check_product(x: torch.Tensor, packed: PackedW4, out: torch.Tensor) -> None:
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
        raise ValueError(f"x is on {x.device}, Triton needs CUDA: use the CPU kernel")
    if tuple(out.shape) != (rows, packed.out_features) or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()}, must be contiguous "
            f"({rows}, {packed.out_features})"
        )


def matmul_w4(
    x: torch.Tensor,
    packed: PackedW4,
    config: W4Config,
    *,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out [M, N] = x [M, K] @ W.T (+ residual [M, N])``; deterministic, CUDA-graph safe.

    ``workspace``: see ``split_k_triton``; needed when ``config.splits`` exceeds 1.
    """
    _check_product(x, packed, out)
    rows = x.shape[0]
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # the kernel loads 16 bytes at a time
    padded_n, _ = packed.padded
    # 64 features times 16 rows do not always fit a warp's registers
    block_n = min(config.block_n, 32) if rows > 8 else config.block_n
    grid = (padded_n // block_n, config.splits)
    counters, partials = out, out  # never touched without a split
    if config.splits > 1:
        needed = w4_workspace_bytes(packed, rows, config)
        counters, partials = split_k_views(workspace, needed, grid[0])
    w4_decode_kernel[grid](
        x, packed.words, packed.scales, packed.zeros, out, residual, partials, counters, rows,
        N=packed.out_features, NP=padded_n, K=packed.in_features, CHUNKS=packed.words.shape[1],
        GS=packed.group_size, X_STRIDE=x.stride(0), BN=block_n,
        BM=max(8, triton.next_power_of_2(rows)), SPLITS=config.splits,
        # Up to 16 rows: beside the sums of 32 the next chunk's registers cost more than they bring.
        PREFETCH=config.prefetch and rows <= 16,
        HAS_ZEROS=packed.zeros is not None, HAS_RESIDUAL=residual is not None,
        BF16=x.dtype == torch.bfloat16, ASM=x.is_cuda and torch.version.cuda is not None,
        num_warps=1, num_stages=config.num_stages,
    )  # fmt: skip
    return out
