"""Decode attention over a paged KV cache on CUDA through Triton, fp16, bf16 or fp8 e4m3.

Shape letters: B sequences, T query tokens per sequence (1, or a few to verify a draft), HQ query
heads, HK key/value heads, D head size, P pages, S tokens per page, L splits along the sequence.

    k_cache  [P, HK, S, D]    a key is contiguous
    v_cache  [P, HK, D, S]    values are transposed: for one d, tokens are contiguous

Values transposed, because ``tl.dot`` wants 8-bit values token-contiguous and there is no
transposing load for bytes; token-major they are read from shared memory one byte at a time. fp8
caches are uint8 tensors, because Triton refuses fp8 pointers below sm_89; there e4m3 becomes fp16
by a bit trick. With pages of at least one tile (256 tokens, say) a tile needs one page number;
smaller pages gather.

One program attends for one key/value head of one sequence over one of L stretches; its rows are the
query heads of that head times T. The last to arrive merges the stretches, in order. The stretch is
computed from ``seq_lens`` on the device, so a captured graph serves any length. Contents of a page
past the sequence's end are never used, whatever they are.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

COUNTER_BYTES = 1 << 16
_LOG2_E = tl.constexpr(1.4426950408889634)

# Four e4m3 codes ($2) -> four fp16 numbers in $0, $1, each value / 256: sign and the other seven
# bits moved to where fp16 has them; the exponent bias differs by 8. Exact, subnormals included;
# the NaN codes 0x7f and 0xff become +-480.
E4M3_ASM = tl.constexpr(
    "{.reg .b32 a,b,s; prmt.b32 a,$2,0,0x1404; prmt.b32 b,$2,0,0x3424; "
    "shr.b32 s,a,1; and.b32 s,s,0x3f803f80; lop3.b32 $0,a,0x80008000,s,0xEA; "
    "shr.b32 s,b,1; and.b32 s,s,0x3f803f80; lop3.b32 $1,b,0x80008000,s,0xEA;}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """One layer's cache.

    Attributes:
        k_cache: [P, HK, S, D], fp16, bf16, or uint8 holding e4m3 codes.
        v_cache: [P, HK, D, S], same dtype.
        k_scale, v_scale: fp32 [HK], value = code * scale; fp8 only.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether the caches hold e4m3 codes."""
        return self.k_cache.dtype == torch.uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedConfig:
    """How attention is launched.

    Attributes:
        block_tokens: Tokens per tile, a power of two of at least 16.
        splits: L, programs along the sequence; fixed when a graph is captured.
        num_warps, num_stages: Triton's.
        hardware_fp8: Use the card's e4m3 conversion (sm_89 and later); None: ask the device.
    """

    block_tokens: int = 64
    splits: int = 16
    num_warps: int = 2
    num_stages: int = 3
    hardware_fp8: bool | None = None


def _rows(query: torch.Tensor, cache: PagedKV) -> int:
    """Rows of a program, padded to what ``tl.dot`` takes."""
    group = query.shape[2] // cache.k_cache.shape[1]
    return max(16, 1 << (query.shape[1] * group - 1).bit_length())


def paged_workspace_bytes(query: torch.Tensor, cache: PagedKV, config: PagedConfig) -> int:
    """Bytes of zeroed workspace for ``query`` [B, T, HQ, D]; counters are left at zero.

    int32 counters [B, HK] in the first 64 KiB, then fp32 [B, HK, L, rows, D + 2].
    """
    if config.splits == 1:
        return 0
    batch, _, _, dim = query.shape
    heads = cache.k_cache.shape[1]
    return COUNTER_BYTES + 4 * batch * heads * config.splits * _rows(query, cache) * (dim + 2)


def encode_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` as e4m3 codes in a uint8 tensor, saturating at +-448. ``scale`` broadcasts."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers that ``encode_e4m3`` codes stand for."""
    return codes.view(torch.float8_e4m3fn).float() * scale


def paged_decode_reference(
    query: torch.Tensor, cache: PagedKV, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Attention as fp32 [B, T, HQ, D], in plain torch; arguments as for ``paged_decode``."""
    return torch.stack(
        [
            _attend(query[b].float(), *_gather(cache, block_table[b], int(seq_lens[b])))
            for b in range(query.shape[0])
        ]
    )


def _gather(cache: PagedKV, pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence as fp32 [HK, length, D]."""
    used = pages[: -(-length // cache.k_cache.shape[2])].long()
    keys, values = cache.k_cache[used], cache.v_cache[used].transpose(2, 3)
    if cache.k_scale is not None and cache.v_scale is not None:
        keys = decode_e4m3(keys, cache.k_scale[:, None, None])
        values = decode_e4m3(values.contiguous(), cache.v_scale[:, None, None])
    joined = (t.float().transpose(0, 1).flatten(1, 2)[:, :length] for t in (keys, values))
    return next(joined), next(joined)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query: [T, HQ, D], its last token at position ``length - 1``; keys: [HK, length, D]."""
    tokens, heads, dim = query.shape
    length, repeat = keys.shape[1], heads // keys.shape[0]
    keys, values = (t.repeat_interleave(repeat, 0) for t in (keys, values))
    scores = torch.einsum("thd,hnd->htn", query, keys) / dim**0.5
    positions = torch.arange(length, device=query.device)
    last_visible = length - tokens + torch.arange(tokens, device=query.device)
    scores = scores.masked_fill(positions[None, :] > last_visible[:, None], float("-inf"))
    return torch.einsum("htn,hnd->thd", scores.softmax(-1).nan_to_num(), values)


@triton.jit
def _e4m3_to_fp16(codes, HARDWARE: tl.constexpr, ASM: tl.constexpr):
    """uint8 -> fp16: the value with HARDWARE, else the value / 256."""
    if HARDWARE:
        out = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif ASM:
        out = tl.inline_asm_elementwise(
            E4M3_ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.uint16)
        out = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return out


@triton.jit
def _attend_tile(
    acc, peak, total, q, k_cache, v_cache, table, start, stop, last_visible, head, scale,
    HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, ASM: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One tile of online softmax. TAIL: some tokens are past the end or not visible to all rows."""
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    if PAGE % BN == 0:
        page = tl.load(table + start // PAGE).to(tl.int64)
        base = (page * HK + head) * (PAGE * D)
        # without the hint the compiler reads transposed values one byte at a time
        offset = tl.multiple_of(start % PAGE, BN)
        k_ptr = k_cache + base + (offset + rn)[:, None] * D + rd[None, :]
        v_ptr = v_cache + base + rd[:, None] * PAGE + (offset + rn)[None, :]
        k = tl.load(k_ptr)  # tokens past the end are in the same page: no mask
        v = tl.load(v_ptr)
    else:
        page = tl.load(table + (start + rn) // PAGE, mask=start + rn < stop, other=0).to(tl.int64)
        base = (page * HK + head) * (PAGE * D)
        offset = (start + rn) % PAGE
        k = tl.load(k_cache + (base + offset * D)[:, None] + rd[None, :])
        v = tl.load(v_cache + (base + offset)[None, :] + rd[:, None] * PAGE)
    if FP8:
        k = _e4m3_to_fp16(k, HARDWARE, ASM)
        v = _e4m3_to_fp16(v, HARDWARE, ASM)
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k)) * scale
    if TAIL:
        token = start + rn
        visible = (token[None, :] <= last_visible[:, None]) & (token < stop)[None, :]
        scores = tl.where(visible, scores, -1e30)
        v = tl.where((token < stop)[None, :], v, 0.0).to(q.dtype)  # 0 * NaN is not 0
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    p = tl.exp2(scores - higher[:, None])
    if TAIL:
        p = tl.where(visible, p, 0.0)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), tl.trans(v), acc * shrink[:, None])
    return acc, higher, total


@triton.jit(do_not_specialize=["table_stride"])
def paged_decode_kernel(
    query, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale, out, partials, stats,
    counters, softmax_scale, table_stride,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, HARDWARE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (HK, SPLITS, B). Row r of BM is query token r // G, query head head * G + r % G.

    partials: fp32 [B, HK, SPLITS, BM, D]. stats: fp32 [B, HK, SPLITS, BM, 2]: peak, sum.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    G: tl.constexpr = HQ // HK
    length = tl.load(seq_lens + b)  # the T new tokens included
    stretch = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BN), 1) * BN
    used = tl.maximum(tl.cdiv(length, stretch), 1)
    if split < used:
        start = split * stretch
        stop = tl.minimum(start + stretch, length)
        rm = tl.arange(0, BM)
        rd = tl.arange(0, D)
        row = ((b * T + rm // G) * HQ + head * G + rm % G).to(tl.int64)
        row_ok = rm < T * G
        q = tl.load(query + row[:, None] * D + rd[None, :], mask=row_ok[:, None], other=0.0)
        last_visible = length - T + rm // G
        fold: tl.constexpr = 256.0 if FP8 and not HARDWARE else 1.0  # see E4M3_ASM
        scale = softmax_scale * _LOG2_E * fold
        if FP8:
            scale *= tl.load(k_scale + head)
        table = block_table + b * table_stride
        acc = tl.zeros((BM, D), tl.float32)
        peak = tl.full((BM,), -1e30, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        # whole tiles that every row may see, then the rest (one tile, or two with T > 1)
        whole = tl.maximum(tl.minimum(stop, length - T + 1) - start, 0) // BN * BN
        for s in tl.range(start, start + whole, BN, num_stages=STAGES):
            acc, peak, total = _attend_tile(
                acc, peak, total, q, k_cache, v_cache, table, s, stop, last_visible, head, scale,
                HK, D, PAGE, BN, FP8, HARDWARE, ASM, False,
            )  # fmt: skip
        for s in tl.range(start + whole, stop, BN, num_stages=1):
            acc, peak, total = _attend_tile(
                acc, peak, total, q, k_cache, v_cache, table, s, stop, last_visible, head, scale,
                HK, D, PAGE, BN, FP8, HARDWARE, ASM, True,
            )  # fmt: skip
        gain = fold
        if FP8:
            gain = fold * tl.load(v_scale + head)
        out_ptr = out + row[:, None] * D + rd[None, :]
        if used == 1:
            acc = acc * (gain / tl.maximum(total, 1e-30))[:, None]
            tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=row_ok[:, None])
        else:
            first = (b * HK + head) * SPLITS
            at = (first + split) * BM + rm
            tl.store(partials + at[:, None] * D + rd[None, :], acc, cache_modifier=".cg")
            tl.store(stats + at * 2, peak, cache_modifier=".cg")
            tl.store(stats + at * 2 + 1, total, cache_modifier=".cg")
            tl.debug_barrier()  # every thread's store before the one thread's atomic releases them
            counter = counters + b * HK + head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
                acc = tl.zeros((BM, D), tl.float32)
                peak = tl.full((BM,), -1e30, tl.float32)
                total = tl.zeros((BM,), tl.float32)
                for i in tl.range(0, used, loop_unroll_factor=4):
                    at = (first + i) * BM + rm
                    part_ptr = partials + at[:, None] * D + rd[None, :]
                    part = tl.load(part_ptr, mask=row_ok[:, None], other=0.0, cache_modifier=".cg")
                    part_peak = tl.load(stats + at * 2, cache_modifier=".cg")
                    higher = tl.maximum(peak, part_peak)
                    shrink = tl.exp2(peak - higher)
                    grow = tl.exp2(part_peak - higher)
                    part_total = tl.load(stats + at * 2 + 1, cache_modifier=".cg")
                    total = total * shrink + part_total * grow
                    acc = acc * shrink[:, None] + part * grow[:, None]
                    peak = higher
                acc = acc * (gain / tl.maximum(total, 1e-30))[:, None]
                tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=row_ok[:, None])
                tl.atomic_xchg(counter, 0, sem="relaxed")


def check_paged(query: torch.Tensor, cache: PagedKV, config: PagedConfig) -> None:
    """Raises ``ValueError`` when the kernel cannot serve ``query`` [B, T, HQ, D] on ``cache``."""
    _, tokens, heads, dim = query.shape
    pages, kv_heads, page, cache_dim = cache.k_cache.shape
    if tuple(cache.v_cache.shape) != (pages, kv_heads, dim, page) or cache_dim != dim:
        raise ValueError(
            f"caches are {tuple(cache.k_cache.shape)} and {tuple(cache.v_cache.shape)}, must be "
            f"[P, HK, S, {dim}] and [P, HK, {dim}, S]"
        )
    if dim not in (32, 64, 128, 256):
        raise ValueError(f"head size {dim} is not 32, 64, 128 or 256: use another backend")
    if heads % kv_heads or tokens * (heads // kv_heads) > 128:
        raise ValueError(
            f"{heads} query heads on {kv_heads} with {tokens} tokens: heads must divide and make "
            "at most 128 rows; use the prefill kernel"
        )
    if page & (page - 1) or page < 16 or config.block_tokens % 16:
        raise ValueError(f"page of {page} tokens, must be a power of two of at least 16")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"query is {query.dtype}, must be float16 or bfloat16")
    if not cache.is_fp8 and cache.k_cache.dtype != query.dtype:
        raise ValueError(f"cache is {cache.k_cache.dtype}, query {query.dtype}: they must agree")
    if cache.is_fp8 and (cache.k_scale is None or cache.v_scale is None):
        raise ValueError(f"an fp8 cache needs k_scale and v_scale, fp32 [{kv_heads}]")
    if not query.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(f"query is on {query.device}, Triton needs CUDA: use the CPU backend")


def _has_hardware_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _workspace_views(
    workspace: torch.Tensor | None, needed: int, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The workspace as counters, partials, stats; ``sizes``: B * HK and floats of partials."""
    if workspace is None or workspace.dtype != torch.uint8 or workspace.numel() < needed:
        got = "None" if workspace is None else f"{workspace.dtype} {tuple(workspace.shape)}"
        raise ValueError(f"workspace is {got}: pass {needed} zeroed bytes as uint8")
    if sizes[0] * 4 > COUNTER_BYTES:
        raise ValueError(f"{sizes[0]} heads over all sequences, at most {COUNTER_BYTES // 4}")
    floats = workspace[COUNTER_BYTES:needed].view(torch.float32)
    return workspace[:COUNTER_BYTES].view(torch.int32), floats[: sizes[1]], floats[sizes[1] :]


def paged_decode(
    query: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    config: PagedConfig,
    *,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention of the last T tokens of each sequence, into ``out`` [B, T, HQ, D].

    Args:
        query: [B, T, HQ, D], fp16 or bf16, contiguous; its keys are in the cache already.
        block_table: int32 [B, pages of a sequence], pages in order.
        seq_lens: int32 [B], tokens in the cache, the T new ones included; 0 gives zeros.
        workspace: uint8 of ``paged_workspace_bytes``, zeroed once.
        softmax_scale: D ** -0.5 by default.
    """
    check_paged(query, cache, config)
    batch, tokens, heads, dim = query.shape
    _, kv_heads, page, _ = cache.k_cache.shape
    rows = _rows(query, cache)
    counters = partials = stats = out  # never touched without a split
    if config.splits > 1:
        needed = paged_workspace_bytes(query, cache, config)
        sizes = (batch * kv_heads, batch * kv_heads * config.splits * rows * dim)
        counters, partials, stats = _workspace_views(workspace, needed, sizes)
    hardware = config.hardware_fp8
    if hardware is None:
        hardware = _has_hardware_fp8(query.device)
    paged_decode_kernel[(kv_heads, config.splits, batch)](
        query, cache.k_cache, cache.v_cache, block_table, seq_lens, cache.k_scale, cache.v_scale,
        out, partials, stats, counters, softmax_scale or dim**-0.5, block_table.stride(0),
        HQ=heads, HK=kv_heads, D=dim, PAGE=page, T=tokens, BM=rows, BN=config.block_tokens,
        SPLITS=config.splits, STAGES=config.num_stages, FP8=cache.is_fp8, HARDWARE=hardware,
        ASM=query.is_cuda and torch.version.cuda is not None, num_warps=config.num_warps,
    )  # fmt: skip
    return out
