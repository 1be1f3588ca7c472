"""The rows of a batch that are one token of a sequence, as tensors a kernel can read.

Shape letters: B decode rows, P blocks of the longest of their sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingle.attention.metadata import ForwardBatch, SequenceSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """How a batch splits into decode rows and the rest.

    Attributes:
        num_rows: B.
        rows: int64 [B], their places in the batch; None: they are the batch, in order.
        block_table: int32 [B, P], filled up with the null block.
        seq_lens: int32 [B], the new token included.
        max_seq_len: The largest of them.
        others: The other sequences.
    """

    num_rows: int
    rows: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    others: tuple[SequenceSpan, ...]


class DecodePlanner:
    """Splits a batch once per step, for all layers.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._batch: ForwardBatch | None = None
        self._plan: DecodeRows | None = None

    def __call__(self, batch: ForwardBatch) -> DecodeRows | None:
        """The batch's decode rows, on the device of its tensors; None when it has none."""
        if batch is not self._batch:
            self._batch, self._plan = batch, self._make(batch)
        return self._plan

    def use(self, batch: ForwardBatch, plan: DecodeRows) -> None:
        """Takes ``plan`` for ``batch``, where who made the batch knows it already."""
        self._batch, self._plan = batch, plan

    def _make(self, batch: ForwardBatch) -> DecodeRows | None:
        spans = [span for span in batch.spans if span.num_new == 1]
        if not spans:
            return None
        device = batch.token_ids.device
        starts = [span.start for span in spans]
        is_all = len(spans) == len(batch.spans)
        tables = [self._used_blocks(span) for span in spans]
        width = max(map(len, tables))
        padded = [[*table, *(0 for _ in range(width - len(table)))] for table in tables]
        lengths = [span.seq_len for span in spans]
        return DecodeRows(
            num_rows=len(spans),
            rows=None if is_all else torch.tensor(starts, device=device),
            block_table=torch.tensor(padded, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            max_seq_len=max(lengths),
            others=tuple(span for span in batch.spans if span.num_new != 1),
        )

    def _used_blocks(self, span: SequenceSpan) -> list[int]:
        return list(span.block_table[: -(-span.seq_len // self._block_size)])
