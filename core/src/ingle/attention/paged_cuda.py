"""Attention on CUDA: decode rows in place through Triton, prompts through torch.

Shape letters: T rows, B decode rows, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import torch

from ingle.attention.decode_rows import DecodePlanner, DecodeRows
from ingle.attention.gathered import GatheredAttention
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.attention.paged_triton import (
    COUNTER_BYTES,
    PagedConfig,
    PagedKV,
    paged_decode,
    paged_workspace_bytes,
)

SPLITS = (1, 8, 32)
"""Programs along a sequence, few choices because each is compiled. Too many cost little: those
without tokens end at once."""
PROGRAMS_PER_SM = 2
"""Programs that keep a multiprocessor busy: two warps each, with most of its registers."""


class PagedScratch:
    """What the layers share: the plan of the step, and workspace that grows when a batch does.

    Args:
        planner: Splits batches.
        num_sms: Multiprocessors of the card.
    """

    def __init__(self, planner: DecodePlanner, num_sms: int) -> None:
        self.planner = planner
        self._num_sms = num_sms
        self._workspace: torch.Tensor | None = None

    def config(self, programs: int, head_dim: int) -> PagedConfig:
        """A launch that fills the card; ``programs``: sequences times heads, before a split."""
        splits = self._splits(programs)
        return PagedConfig(block_tokens=64 if head_dim <= 128 else 32, splits=splits)

    def batch_sizes(self, num_kv_heads: int) -> list[int]:
        """For every launch there is, the smallest number of sequences that gets it."""
        first: dict[int, int] = {}
        for size in range(1, PROGRAMS_PER_SM * self._num_sms + 2):
            first.setdefault(self._splits(size * num_kv_heads), size)
        return list(first.values())

    def _splits(self, programs: int) -> int:
        if programs * 4 > COUNTER_BYTES:
            return 1
        wanted = PROGRAMS_PER_SM * self._num_sms // programs
        return next((splits for splits in SPLITS if splits >= wanted), SPLITS[-1])

    def workspace(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        """At least ``num_bytes``, zeroed when made; None when none are needed."""
        if num_bytes > (0 if self._workspace is None else self._workspace.numel()):
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._workspace if num_bytes else None


class PagedCUDAAttention:
    """One launch attends for all decode rows of a batch; other rows go sequence by sequence.

    A row whose sliding window is shorter than its sequence, and a cache whose layout cannot be
    read in place, are gathered.

    Args:
        scale: Factor on the logits.
        window: Tokens a row attends to at most, itself included; None is all before it.
        scratch: Shared by all layers.
        has_flash: Whether torch has flash attention here.
    """

    name = "paged_triton"

    def __init__(
        self, scale: float, window: int | None, scratch: PagedScratch, *, has_flash: bool = False
    ) -> None:
        self.scale = scale
        self.window = window
        self.scratch = scratch
        self._gathered = GatheredAttention(scale, window, has_flash=has_flash)

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] over what ``cache`` holds: [T, Q * D]."""
        plan = self.scratch.planner(batch)
        pages = None if plan is None else paged_cache(cache)
        if plan is None or pages is None or self._is_windowed(plan):
            return self._gathered(query, cache, batch)
        if plan.rows is None:
            return self._decode(query, pages, plan)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        out[plan.rows] = self._decode(query.index_select(0, plan.rows), pages, plan)
        for span in plan.others:
            rows = query[span.start : span.stop]
            out[span.start : span.stop] = self._gathered.attend(rows, cache, span)
        return out

    def _is_windowed(self, plan: DecodeRows) -> bool:
        return self.window is not None and self.window < plan.max_seq_len

    def _decode(self, query: torch.Tensor, pages: PagedKV, plan: DecodeRows) -> torch.Tensor:
        """``query`` [B, Q, D] to [B, Q * D]."""
        rows = query.contiguous().unsqueeze(1)
        config = self.scratch.config(plan.num_rows * pages.k_cache.shape[1], rows.shape[-1])
        needed = paged_workspace_bytes(rows, pages, config)
        out = paged_decode(
            rows,
            pages,
            plan.block_table,
            plan.seq_lens,
            config,
            out=torch.empty_like(rows),
            workspace=self.scratch.workspace(needed, rows.device),
            softmax_scale=self.scale,
        )
        return out.flatten(1)


def paged_cache(cache: LayerCache) -> PagedKV | None:
    """The layer's cache as the kernel reads it; None when a side has another layout or type."""
    keys, values = cache.k_store.paged(), cache.v_store.paged()
    if keys is None or values is None or keys.blocks.dtype != values.blocks.dtype:
        return None
    return PagedKV(
        k_cache=keys.blocks, v_cache=values.blocks, k_scale=keys.scale, v_scale=values.scale
    )
