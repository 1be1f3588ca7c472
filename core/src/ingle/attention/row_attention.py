"""One token each of several sequences in one compiled call, over a cache as it is stored.

torch's kernel takes one sequence at a time, or all of them with their keys copied side by side and
a mask. This reads the blocks of all in place, as compiled decode steps do for one.

There is a function for every number of query heads of a key/value head, and head size: the
compiler's process finds one by its name, such as ``ROWS_3_64``.

Shape letters: R sequences, H key/value heads, G query heads of each, D head size, P pieces of S
tokens in the cache, N pieces of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import SequenceSpan, int_tensor
from ingle.plugin.compiled_function import MIN_SIZE, Compilable, CompiledFunction
from ingle.plugin.kv_cache import read_plain

PIECE = 16
"""Tokens of a piece; blocks are whole pieces."""


def attend_rows(query: torch.Tensor, *rest: torch.Tensor) -> None:
    """Attention of rows to their own sequences, in float32.

    Args:
        query: bfloat16 [R, H, G, D].
        rest: Keys and values, each bfloat16 [H, P, S, D]; each sequence's pieces int64 [R, N], any
            past its end; the last token that each row sees int32 [R], counted from its sequence's
            first; a factor on the logits float32 [1]; and what takes the result, bfloat16
            [R, H, G, D].
    """
    keys, values, table, last, scale, out = rest
    at = torch.arange(table.shape[1] * PIECE, dtype=torch.int32).view(-1, PIECE)
    is_read = at <= last.view(-1, 1, 1)
    rows = (query.float() * scale).transpose(0, 1).contiguous()
    rows = torch.as_strided(rows, rows.shape, rows.stride())  # written once, not in every product
    key = keys[:, table].float()
    # What a failed request left behind a sequence's end may be no number, and 0 * NaN is not 0.
    value = torch.where(is_read.unsqueeze(-1), values[:, table].float(), 0.0)
    # Written out for every head of a group, so that one loop over the keys serves them all.
    groups = range(query.shape[2])
    logits = [(rows[:, :, g, None, None] * key).sum(-1) for g in groups]
    logits = [torch.where(is_read, one, -torch.inf) for one in logits]
    shares = [torch.exp(one - one.amax((2, 3), keepdim=True)) for one in logits]
    shares = [one * one.sum((2, 3), keepdim=True).reciprocal() for one in shares]
    for g in groups:
        found = (shares[g].unsqueeze(-1) * value).sum((2, 3))
        out[:, :, g].copy_(found.transpose(0, 1))


def __getattr__(name: str) -> Compilable:
    """The function of that name."""
    parts = name.split("_")
    if len(parts) == 3 and parts[0] == "ROWS":
        return _compilable(int(parts[1]), int(parts[2]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _compilable(groups: int, size: int) -> Compilable:
    stored = (("heads", "pieces", PIECE, size), torch.bfloat16)
    rows = (("rows", "heads", groups, size), torch.bfloat16)
    return Compilable(
        name=f"{__name__}:ROWS_{groups}_{size}",
        function=attend_rows,
        arguments=(
            rows,
            stored,
            stored,
            (("rows", "table"), torch.int64),
            (("rows",), torch.int32),
            ((1,), torch.float32),
            rows,
        ),
        usual={"rows": 16, "heads": 4, "pieces": 128, "table": 16},
        max_relative_error=2.0**-6,
        is_written_out=True,
    )


class RowAttention:
    """The call.

    Args:
        scale: Factor on the logits.
        groups: G.
        size: D.

    Attributes:
        function: Serves once it is compiled.
    """

    def __init__(self, scale: float, groups: int, size: int) -> None:
        self.function = CompiledFunction(_compilable(groups, size))
        self._scale = torch.tensor([scale], dtype=torch.float32)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: RowTable
    ) -> torch.Tensor:
        """``query`` bfloat16 [R, Q, D] over ``keys`` and ``values`` [H, B, S, D]: [R, Q * D]."""
        heads, size = keys.shape[0], keys.shape[3]
        rows = query.contiguous().view(query.shape[0], heads, -1, size)
        out = torch.empty_like(rows)
        pieces = (one.view(heads, -1, PIECE, size) for one in (keys, values))
        self.function(rows, *pieces, table.pieces, table.last, self._scale, out)
        return out.view(query.shape[0], -1)


def is_plain(cache: LayerCache) -> bool:
    """Whether keys and values are stored as they are, head by head, in blocks of whole pieces."""
    sides = [store.compiled() for store in (cache.k_store, cache.v_store)]
    is_known = all(side is not None and side.read is read_plain for side in sides)
    return is_known and cache.k_store.geometry.block_size % PIECE == 0


def plain_tensors(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache that ``is_plain``, each [H, B, S, D]."""
    keys, values = cache.k_store.compiled(), cache.v_store.compiled()
    assert keys is not None
    assert values is not None
    return keys.tensors[0], values.tensors[0]


class RowTable:
    """Where the sequences of a step lie, in pieces.

    Args:
        spans: With one new token each.
        block_size: Tokens in a block.
    """

    name: Final = "row_table"

    def __init__(self, spans: Sequence[SequenceSpan], block_size: int) -> None:
        per_block = block_size // PIECE
        longest = max(max(MIN_SIZE, -(-one.seq_len // PIECE)) for one in spans)
        blocks = -(-longest // per_block)
        rows = [
            int_tensor([*one.block_table[: -(-one.seq_len // block_size)], *[0] * blocks][:blocks])
            for one in spans
        ]
        pieces = torch.stack(rows)[:, :, None] * per_block + torch.arange(per_block)
        self.pieces = pieces.flatten(1)[:, :longest].contiguous()
        self.last = torch.tensor([one.seq_len - 1 for one in spans], dtype=torch.int32)
