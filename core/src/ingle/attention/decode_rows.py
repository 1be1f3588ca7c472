"""A batch as the paged kernel reads it: sequences with one new token, and the others.

Shape letters: S sequences, P blocks of the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_triton import PagedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How a batch splits: decode steps, and prompts; None where there are none."""

    decodes: PagedRows | None
    prompts: PagedRows | None


class StepPlanner:
    """Splits a batch once per step, for all layers.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch: ForwardBatch | None = None
        self._plan: StepPlan | None = None

    def __call__(self, batch: ForwardBatch) -> StepPlan:
        """The batch's plan, on the device of its tensors."""
        if batch is not self._batch or self._plan is None:
            device = batch.token_ids.device
            decodes = [span for span in batch.spans if span.num_new == 1]
            prompts = [span for span in batch.spans if span.num_new != 1]
            self._batch, self._plan = (
                batch,
                StepPlan(decodes=self._rows(decodes, device), prompts=self._rows(prompts, device)),
            )
        return self._plan

    def use(self, batch: ForwardBatch, plan: StepPlan) -> None:
        """Takes ``plan`` for ``batch``, where who made the batch knows it already."""
        self._batch, self._plan = batch, plan

    def _rows(self, spans: Sequence[SequenceSpan], device: torch.device) -> PagedRows | None:
        if not spans:
            return None
        tables = [self._used_blocks(span) for span in spans]
        width = max(map(len, tables))
        padded = [[*table, *(0 for _ in range(width - len(table)))] for table in tables]

        def tensor(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return PagedRows(
            block_table=tensor(padded),
            seq_lens=tensor([span.seq_len for span in spans]),
            row_starts=tensor([span.start for span in spans]),
            new_lens=tensor([span.num_new for span in spans]),
            max_new=max(span.num_new for span in spans),
        )

    def _used_blocks(self, span: SequenceSpan) -> list[int]:
        return list(span.block_table[: -(-span.seq_len // self._block_size)])
