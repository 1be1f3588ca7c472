"""Attention on CUDA, in place through Triton: decode steps and prompts.

Shape letters: T rows, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import torch

from ingle.attention.decode_rows import StepPlanner
from ingle.attention.layer_cache import LayerCache, turned
from ingle.attention.metadata import ForwardBatch
from ingle.attention.paged_triton import (
    COUNTER_BYTES,
    PagedCache,
    PagedConfig,
    PagedRows,
    Softmax,
    decode_config,
    paged_attention,
    paged_cache,
    prompt_config,
    workspace_bytes,
)
from ingle.attention.paged_write import rotate_and_write

SPLITS = (1, 8, 32)
"""Programs along a sequence, few choices because each is compiled. Too many cost little: those
without tokens end at once."""
PROGRAMS_PER_SM = 2
"""Programs that keep a multiprocessor busy: four warps each, with most of its registers."""


class PagedScratch:
    """What the layers share: the plan of the step, and workspace that grows when a batch does.

    Args:
        planner: Splits batches.
        num_sms: Multiprocessors of the card.
    """

    def __init__(self, planner: StepPlanner, num_sms: int) -> None:
        self.planner = planner
        self._num_sms = num_sms
        self._workspace: torch.Tensor | None = None

    def config(self, programs: int, head_dim: int, group: int) -> PagedConfig:
        """A decode launch that fills the card; ``programs``: sequences times key/value heads,
        before a split; ``group``: query heads of each."""
        return decode_config(head_dim, group, self._splits(programs))

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
    """One launch attends for all decode rows of a batch, one for the rows of all prompts.

    Args:
        softmax: What happens to logits.
        scratch: Shared by all layers.
    """

    name = "paged_triton"
    writer = staticmethod(rotate_and_write)

    def __init__(self, softmax: Softmax, scratch: PagedScratch) -> None:
        self.softmax = softmax
        self.scratch = scratch

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] over what ``cache`` holds: [T, Q * D]."""
        pages = paged_cache(cache)
        assert pages is not None
        plan = self.scratch.planner(batch)
        rows = turned(query, cache.k_store.rotation).contiguous()
        out = torch.empty_like(rows)
        if plan.decodes is not None:
            programs = plan.decodes.num_sequences * pages.num_kv_heads
            group = rows.shape[1] // pages.num_kv_heads
            config = self.scratch.config(programs, rows.shape[-1], group)
            self._launch(rows, pages, plan.decodes, config, out)
        if plan.prompts is not None:
            config = prompt_config(rows.shape[-1], pages.block_size)
            self._launch(rows, pages, plan.prompts, config, out)
        back = cache.v_store.rotation
        return turned(out, None if back is None else back.T).flatten(1)

    def _launch(
        self,
        query: torch.Tensor,
        pages: PagedCache,
        rows: PagedRows,
        config: PagedConfig,
        out: torch.Tensor,
    ) -> None:
        needed = workspace_bytes(query, pages, rows, config)
        workspace = self.scratch.workspace(needed, query.device)
        paged_attention(query, pages, rows, config, self.softmax, out=out, workspace=workspace)
