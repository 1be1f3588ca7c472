"""Causal attention within rows of equal length, without a paged cache.

Shape letters: R rows, L tokens of a row, T = R * L, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.attention.reference import attend


class RowCache(LayerCache):
    """Keys and values of the rows that are being computed, and of nothing else."""

    def __init__(self) -> None:
        # The slots of a LayerCache stay empty: nothing here reads a store.
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Holds ``key`` and ``value`` [T, H, D] until the next call."""
        self.held = (key, value)


class RowAttention:
    """Each row attends to itself.

    Args:
        row_length: L.
        scale: Factor on the logits.
        window: Tokens attended to at most, itself included; None: all before.
        softcap: Bound of the logits, or None.
    """

    name = "rows"
    writer: None = None

    def __init__(
        self, row_length: int, scale: float, window: int | None, softcap: float | None
    ) -> None:
        self.row_length = row_length
        self.scale = scale
        self.window = window if window is not None and window < row_length else None
        self.softcap = softcap

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] to [T, Q * D]."""
        assert isinstance(cache, RowCache)
        assert cache.held is not None
        queries, keys, values = (
            part.reshape(-1, self.row_length, *part.shape[1:]).transpose(1, 2)
            for part in (query, *cache.held)
        )
        if self.softcap is not None:
            return self._one_by_one(queries, keys, values)
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=self._mask(query.device),
            is_causal=self.window is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, device: torch.device) -> torch.Tensor | None:
        """bool [L, L], true where a token is seen; None when causal order is all there is."""
        if self.window is None:
            return None
        places = torch.arange(self.row_length, device=device)
        distance = places[:, None] - places[None, :]
        return (distance >= 0) & (distance < self.window)

    def _one_by_one(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        rows = [
            attend(q.transpose(0, 1), k, v, self.scale, self.window, self.softcap)
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(rows).flatten(1)
