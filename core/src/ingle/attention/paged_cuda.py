"""Attention on CUDA, in place through Triton: decode steps and prompts.

Shape letters: T rows, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import torch

from ingle.attention.decode_launches import DecodeLaunches
from ingle.attention.decode_rows import StepPlanner
from ingle.attention.layer_cache import LayerCache, turned
from ingle.attention.metadata import ForwardBatch
from ingle.attention.paged_triton import (
    PagedCache,
    PagedConfig,
    PagedRows,
    Softmax,
    paged_attention,
    paged_cache,
    prompt_config,
    workspace_bytes,
)
from ingle.attention.paged_write import rotate_and_write


class PagedScratch:
    """What the layers share: the plan of the step, and workspace that grows when a batch does.

    Args:
        planner: Splits batches.
        launches: Of decode steps.
    """

    def __init__(self, planner: StepPlanner, launches: DecodeLaunches) -> None:
        self.planner = planner
        self.launches = launches
        self._workspace: torch.Tensor | None = None

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
            config = self._decode_config(plan.decodes.num_sequences, rows, pages.num_kv_heads)
            self._launch(rows, pages, plan.decodes, config, out)
        if plan.prompts is not None:
            is_large = pages.k.large_tiles or pages.v.large_tiles
            config = prompt_config(rows.shape[-1], pages.block_size, is_large=is_large)
            self._launch(rows, pages, plan.prompts, config, out)
        back = cache.v_store.rotation
        return turned(out, None if back is None else back.T).flatten(1)

    def _decode_config(
        self, num_sequences: int, query: torch.Tensor, num_kv_heads: int
    ) -> PagedConfig:
        launches = self.scratch.launches
        if self.softmax.window is not None and launches.measured:  # measured without a window
            launches = DecodeLaunches(num_sms=launches.num_sms)
        group = query.shape[1] // num_kv_heads
        return launches(num_sequences, num_kv_heads, query.shape[-1], group)

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
