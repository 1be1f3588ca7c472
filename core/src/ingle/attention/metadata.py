"""What a forward pass is told about its batch.

Shape letters: T tokens of the batch, S sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def int_tensor(values: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """``values``, one or more, as int64 [n]: ``torch.tensor`` looks at each, which between the
    products of a decode step takes four times as long."""
    return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """One sequence's rows in the batch.

    Attributes:
        start: First row of the batch that is this sequence's.
        stop: One past its last row.
        seq_len: Tokens in the cache once this step has written its own.
        block_table: Block numbers, in sequence order.
        first_block: The first block when the used blocks are consecutive numbers, else None;
            then a cache layout may be read in place.
    """

    start: int
    stop: int
    seq_len: int
    block_table: Sequence[int]
    first_block: int | None

    @property
    def num_new(self) -> int:
        """Tokens this step computes for the sequence."""
        return self.stop - self.start

    @property
    def num_cached(self) -> int:
        """Tokens that were in the cache before this step."""
        return self.seq_len - self.num_new


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """A step as tensors.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        slot_mapping: int64 [T]: where each token's keys and values go.
        spans: One per sequence, in row order.
        made: What attention makes of the spans once for all layers, by a name of its choosing.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    spans: tuple[SequenceSpan, ...]
    made: dict[str, object] = field(default_factory=dict, compare=False, repr=False)


def consecutive_start(blocks: Sequence[int], num_used: int) -> int | None:
    """The first block when ``blocks[:num_used]`` are consecutive numbers, else None."""
    first = blocks[0]
    for offset in range(1, num_used):
        if blocks[offset] != first + offset:
            return None
    return first
