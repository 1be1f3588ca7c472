"""Attention over gathered keys and values with torch's own product, on any device.

Shape letters: T rows, Q query heads, H key/value heads, L cached tokens, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan

WINDOW_ROWS = 256
"""Rows that share a mask under a sliding window: the mask stays below 256 x (256 + window)."""
LOGITS = 1 << 25
"""Logits at a time where torch may write them out: 128 MiB in float32."""


class GatheredAttention:
    """Attends sequence after sequence, in the activation dtype.

    Where torch has flash attention a chunk of a prompt is one call whose memory does not grow with
    the context. Elsewhere rows go in tiles, so that their logits stay within ``LOGITS``.

    Args:
        scale: Factor on the logits.
        window: Tokens a row attends to at most, itself included; None is all before it.
        has_flash: Whether torch has flash attention for this device, dtype and head size.
    """

    name = "gathered"
    writer: None = None

    def __init__(self, scale: float, window: int | None = None, *, has_flash: bool = False) -> None:
        self.scale = scale
        self.window = window
        self._has_flash = has_flash

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] over what ``cache`` holds: [T, Q * D]."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for span in batch.spans:
            out[span.start : span.stop] = self.attend(query[span.start : span.stop], cache, span)
        return out

    def attend(self, query: torch.Tensor, cache: LayerCache, span: SequenceSpan) -> torch.Tensor:
        """One sequence: ``query`` [T, Q, D], its last T tokens, to [T, Q * D]."""
        window = self.window
        windowed = window is not None and window < span.seq_len
        if window is not None and windowed:
            span = _tail(span, window + span.num_new, cache.k_store.geometry.block_size)
        key, value = cache.read(span)
        if query.shape[0] == 1:
            return self._decode(query, key, value)[None]
        if windowed:
            return self._tiles(query, key, value, WINDOW_ROWS)
        rows = query.shape[0]
        if not self._has_flash:
            rows = max(16, LOGITS // (query.shape[1] * key.shape[1]))
        return self._tiles(query, key, value, rows)

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One row over its window: the G query heads of a head are G rows of it, unmasked."""
        if self.window is not None:
            key, value = key[:, -self.window :], value[:, -self.window :]
        rows = query.reshape(1, key.shape[0], -1, query.shape[-1])
        return scaled_dot_product_attention(
            rows, key[None], value[None], scale=self.scale
        ).flatten()

    def _tiles(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int
    ) -> torch.Tensor:
        """``size`` rows at a time, each tile over the keys up to its last row."""
        num_cached = key.shape[1] - query.shape[0]
        tiles = []
        for start in range(0, query.shape[0], size):
            rows = query[start : start + size]
            stop = num_cached + start + rows.shape[0]
            first = 0
            if self.window is not None:
                first = max(0, stop - rows.shape[0] - self.window + 1)
            tiles.append(self._tile(rows, key[:, first:stop], value[:, first:stop]))
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)

    def _tile(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The last T of L tokens: [T, Q * D]."""
        num_rows, length = query.shape[0], key.shape[1]
        mask: torch.Tensor
        if self.window is not None and self.window < length:
            mask = self._window_mask(num_rows, length, query.device)
        else:
            # Imported here: it brings torch's compiler, over a second that no CPU start needs.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(num_rows, length)
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _window_mask(self, num_rows: int, length: int, device: torch.device) -> torch.Tensor:
        """Which of L keys each of the last T rows sees: bool [T, L]."""
        row = torch.arange(length - num_rows, length, device=device)[:, None]
        column = torch.arange(length, device=device)[None, :]
        return (column <= row) & (column > row - (self.window or length))


def _tail(span: SequenceSpan, num_tokens: int, block_size: int) -> SequenceSpan:
    """The span without the blocks that lie wholly before its last ``num_tokens`` tokens."""
    skipped = max(0, span.seq_len - num_tokens) // block_size
    first = None if span.first_block is None else span.first_block + skipped
    return replace(
        span,
        seq_len=span.seq_len - skipped * block_size,
        block_table=span.block_table[skipped:],
        first_block=first,
    )
