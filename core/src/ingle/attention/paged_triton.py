"""Attention over a paged KV cache on CUDA through Triton: what is launched, and when it cannot be.

Any pair of cache formats that have a ``triton_read`` and say how they lie (``KVStore.paged``).

Shape letters: T rows of the batch, S sequences, Q query heads, H key/value heads, D head size,
P blocks of a sequence, L splits along it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ingle.attention.layer_cache import LayerCache
from ingle.attention.paged_kernel import paged_attention_kernel
from ingle.plugin.kv_cache import PagedSide

COUNTER_BYTES = 1 << 16
LARGEST_HEAD = 256
SMALLEST_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """One layer's cache as the kernel reads it.

    Attributes:
        k, v: How each side lies.
        k_read, v_read: The formats' ``triton_read``.
        num_kv_heads: H.
        block_size: Tokens in a block.
    """

    k: PagedSide
    v: PagedSide
    k_read: Callable[..., Any]
    v_read: Callable[..., Any]
    num_kv_heads: int
    block_size: int


def paged_cache(cache: LayerCache) -> PagedCache | None:
    """The layer's cache as the kernel reads it; None when a side cannot be read in place."""
    k, v = cache.k_store.paged(), cache.v_store.paged()
    k_read, v_read = cache.k_format.triton_read, cache.v_format.triton_read
    if k is None or v is None or k_read is None or v_read is None:
        return None
    geometry = cache.k_store.geometry
    return PagedCache(
        k=k,
        v=v,
        k_read=k_read,
        v_read=v_read,
        num_kv_heads=geometry.num_kv_heads,
        block_size=geometry.block_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """The sequences of a launch; all tensors on the device.

    Attributes:
        block_table: int32 [S, P], filled up with any block.
        seq_lens: int32 [S], tokens in the cache, the new ones included; 0 gives zeros.
        row_starts: int32 [S], each sequence's first row of the batch.
        new_lens: int32 [S], its rows.
        max_new: The most rows of a sequence.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    row_starts: torch.Tensor
    new_lens: torch.Tensor
    max_new: int

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """What happens to logits.

    Attributes:
        scale: Factor on them.
        window: Tokens a row attends to at most, itself included; None is all before it.
        softcap: Bound of the scaled logits; None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedConfig:
    """How attention is launched.

    Attributes:
        block_tokens: Tokens per tile, a power of two of at least 16.
        block_rows: Most rows of a tile, a power of two of at least 16.
        splits: L, programs along a sequence; fixed when a graph is captured.
        num_warps, num_stages: Triton's.
    """

    block_tokens: int = 64
    block_rows: int = 16
    splits: int = 16
    num_warps: int = 2
    num_stages: int = 3


def decode_config(head_dim: int, group: int, splits: int) -> PagedConfig:
    """For one row of each sequence; ``group`` query heads share a key/value head."""
    return PagedConfig(
        block_tokens=64 if head_dim <= 128 else 32,
        block_rows=max(16, padded(group)),
        splits=splits,
        num_warps=2 if head_dim <= 64 else 4,
    )


def prompt_config(head_dim: int, cache_block: int, *, is_large: bool = False) -> PagedConfig:
    """For prompts, over blocks of ``cache_block`` tokens; ``is_large``: a side is ``large_tiles``.

    Large tiles do not leave heads of 65 to 128 enough registers (int4 spilled), nor did blocks
    shorter than a tile: half as many rows then go to half as many warps.
    """
    tokens = 32
    is_tight = 64 < head_dim <= 128 and (is_large or cache_block < tokens)
    return PagedConfig(
        block_tokens=tokens,
        block_rows=32 if is_tight or head_dim > 128 else 64,
        splits=1,
        num_warps=4 if is_tight or head_dim <= 64 else 8,
        num_stages=2,
    )


def most_registers(
    cache_block: int, head_dim: int, config: PagedConfig, softmax: Softmax
) -> int | None:
    """A thread's registers to ask the assembler for, or None for its own choice.

    Left to itself it holds the larger kernels to 128 or 168 registers a thread, for more resident
    warps, and spills a few; asked for all 255 it does not (docs/kernels.md). Decode steps of heads
    of 64, which have two warps, and of 256 are among the larger: e4m3 spills on sm_90.
    """
    is_decode, is_bounded = config.splits > 1, bool(softmax.window) or softmax.softcap is not None
    is_whole = head_dim == padded(head_dim) and cache_block >= config.block_tokens
    is_default = config.block_tokens == 64 and config.num_warps == 4
    is_light = head_dim == 128 and is_decode and is_default and is_whole and not is_bounded
    return None if is_light else 255


def padded(size: int) -> int:
    """The power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()


def _tile_rows(query: torch.Tensor, cache: PagedCache, rows: PagedRows, config: PagedConfig) -> int:
    """Rows of a tile."""
    total = rows.max_new * (query.shape[1] // cache.num_kv_heads)
    return max(16, min(config.block_rows, padded(total)))


def workspace_bytes(
    query: torch.Tensor, cache: PagedCache, rows: PagedRows, config: PagedConfig
) -> int:
    """Bytes of zeroed workspace for ``query`` [T, Q, D]; counters are left at zero.

    int32 counters [S, H] in the first 64 KiB, then fp32 [S, H, L, tile rows, D padded + 2].
    """
    if config.splits == 1:
        return 0
    tiles = rows.num_sequences * cache.num_kv_heads * config.splits
    tile = _tile_rows(query, cache, rows, config) * (padded(query.shape[2]) + 2)
    return COUNTER_BYTES + 4 * tiles * tile


def check_paged(
    query: torch.Tensor, cache: PagedCache, rows: PagedRows, config: PagedConfig
) -> None:
    """Raises ``ValueError`` when the kernel cannot serve ``query`` [T, Q, D] on ``cache``."""
    _, heads, dim = query.shape
    page, kv_heads = cache.block_size, cache.num_kv_heads
    if dim > LARGEST_HEAD or dim % 16:
        raise ValueError(
            f"head size {dim} is not a multiple of 16 up to {LARGEST_HEAD}: use another backend"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads on {kv_heads} key/value heads: they must divide")
    if config.splits > 1 and rows.max_new * (heads // kv_heads) > config.block_rows:
        raise ValueError(
            f"{rows.max_new} tokens of {heads // kv_heads} query heads each are more than "
            f"block_rows {config.block_rows}: only a single tile of rows can be split"
        )
    if page & (page - 1) or page < SMALLEST_BLOCK or config.block_tokens % 16:
        raise ValueError(f"block of {page} tokens, must be a power of two of at least 16")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"query is {query.dtype}, must be float16 or bfloat16")
    if not query.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(f"query is on {query.device}, Triton needs CUDA: use the CPU backend")


def _workspace_views(
    workspace: torch.Tensor | None, needed: int, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The workspace as counters, partials, stats; ``sizes``: S * H and floats of partials."""
    if workspace is None or workspace.dtype != torch.uint8 or workspace.numel() < needed:
        got = "None" if workspace is None else f"{workspace.dtype} {tuple(workspace.shape)}"
        raise ValueError(f"workspace is {got}: pass {needed} zeroed bytes as uint8")
    if sizes[0] * 4 > COUNTER_BYTES:
        raise ValueError(f"{sizes[0]} heads over all sequences, at most {COUNTER_BYTES // 4}")
    floats = workspace[COUNTER_BYTES:needed].view(torch.float32)
    return workspace[:COUNTER_BYTES].view(torch.int32), floats[: sizes[1]], floats[sizes[1] :]


def paged_attention(
    query: torch.Tensor,
    cache: PagedCache,
    rows: PagedRows,
    config: PagedConfig,
    softmax: Softmax,
    *,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of each sequence, into those rows of ``out`` [T, Q, D].

    Args:
        query: [T, Q, D], fp16 or bf16, contiguous; its keys are in the cache already.
        workspace: uint8 of ``workspace_bytes``, zeroed once.
    """
    check_paged(query, cache, rows, config)
    _, heads, dim = query.shape
    kv_heads, num_sequences = cache.num_kv_heads, rows.num_sequences
    tile_rows = _tile_rows(query, cache, rows, config)
    tiles = -(-rows.max_new * (heads // kv_heads) // tile_rows)
    counters = partials = stats = out  # never touched without a split
    if config.splits > 1:
        needed = workspace_bytes(query, cache, rows, config)
        programs = num_sequences * kv_heads
        floats = programs * config.splits * tile_rows * padded(dim)
        counters, partials, stats = _workspace_views(workspace, needed, (programs, floats))
    paged_attention_kernel[(kv_heads, tiles * config.splits, num_sequences)](
        query, cache.k.tensors, cache.v.tensors, rows.block_table, rows.seq_lens, rows.row_starts,
        rows.new_lens, out, partials, stats, counters, softmax.scale, softmax.softcap or 0.0,
        rows.block_table.stride(0), K_READ=cache.k_read, K_META=cache.k.meta, V_READ=cache.v_read,
        V_META=cache.v.meta, HQ=heads, HK=kv_heads, D=dim, DP=padded(dim), PAGE=cache.block_size,
        BM=tile_rows, BN=config.block_tokens, SPLITS=config.splits, STAGES=config.num_stages,
        WINDOW=softmax.window or 0, SOFTCAP=softmax.softcap is not None,
        num_warps=config.num_warps,
        maxnreg=most_registers(cache.block_size, dim, config, softmax),
    )  # fmt: skip
    return out
