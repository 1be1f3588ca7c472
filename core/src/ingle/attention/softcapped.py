"""Attention whose logits are bounded by a tanh, in plain torch, tile by tile.

torch's flash kernel has no such bound. Memory stays flat: a tile of rows goes over tiles of keys
and keeps running sums, as in "Online normalizer calculation for softmax" (Milakov and Gimelshein
2018).

Shape letters: T rows, Q query heads, H key/value heads, G = Q // H, L cached tokens, D head size,
S keys of a tile.
"""

from __future__ import annotations

import torch

ROW_TILE = 128
"""Query positions of a tile."""
KEY_TILE = 512
"""Keys of a tile; its logits are float32 [H, G * 128, 512] at most, 2 MiB for 8 query heads."""
LOWEST = -1e30
"""Below every bounded logit, and finite, so that differences of it are numbers."""


class SoftcappedAttention:
    """Causal attention of the last T of L tokens, with logits ``cap * tanh(x * scale / cap)``.

    Args:
        scale: Factor on the logits before they are bounded.
        softcap: The bound.
        window: Tokens a row attends to at most, itself included; None is all before it.
    """

    def __init__(self, scale: float, softcap: float, window: int | None = None) -> None:
        self.scale = scale
        self.softcap = softcap
        self.window = window

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``query`` [T, Q, D] over ``key`` and ``value`` [H, L, D]: [T, Q * D]."""
        first = key.shape[1] - query.shape[0]
        tiles = [
            self._rows(query[start : start + ROW_TILE], key, value, first + start)
            for start in range(0, query.shape[0], ROW_TILE)
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)

    def _rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Rows at positions ``first`` and on: [T, Q * D]."""
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads, stop = key.shape[0], first + num_rows
        by_head = query.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        rows = by_head.reshape(num_kv_heads, -1, head_dim).float() * (self.scale / self.softcap)
        running = _Running(rows, value.shape[-1])
        reach = 0 if self.window is None else max(0, first - self.window + 1)
        for start in range(reach, stop, KEY_TILE):
            end = min(start + KEY_TILE, stop)
            logits = torch.tanh(rows @ key[:, start:end].float().mT) * self.softcap
            hidden = self._hidden(range(first, stop), range(start, end))
            if hidden is not None:
                groups = num_heads // num_kv_heads
                logits.masked_fill_(hidden.repeat(groups, 1), float("-inf"))
            running.add(logits, value[:, start:end].float())
        out = running.result().view(num_kv_heads, -1, num_rows, head_dim)
        return out.permute(2, 0, 1, 3).reshape(num_rows, -1).to(query.dtype)

    def _hidden(self, rows: range, columns: range) -> torch.Tensor | None:
        """Which keys each row may not see, bool [T, S]; None when every row sees all."""
        late = columns.stop - 1 > rows.start
        early = self.window is not None and columns.start <= rows.stop - 1 - self.window
        if not late and not early:
            return None
        at = torch.arange(rows.start, rows.stop)[:, None]
        keys = torch.arange(columns.start, columns.stop)[None, :]
        hidden = keys > at
        return hidden if self.window is None else hidden | (keys <= at - self.window)


class _Running:
    """Softmax-weighted sums of values over the tiles seen so far, rows float32 [H, G * T, D]."""

    def __init__(self, rows: torch.Tensor, head_dim: int) -> None:
        self._sums = rows.new_zeros(*rows.shape[:2], head_dim)
        self._total = rows.new_zeros(*rows.shape[:2], 1)
        self._peak = rows.new_full((*rows.shape[:2], 1), LOWEST)

    def add(self, logits: torch.Tensor, value: torch.Tensor) -> None:
        """Takes in ``logits`` [H, G * T, S], which it overwrites, and ``value`` [H, S, D]."""
        peak = torch.maximum(self._peak, logits.amax(-1, keepdim=True))
        shrink = torch.exp(self._peak - peak)
        weights = logits.sub_(peak).exp_()
        self._total = self._total * shrink + weights.sum(-1, keepdim=True)
        self._sums = torch.baddbmm(self._sums * shrink, weights, value)
        self._peak = peak

    def result(self) -> torch.Tensor:
        """[H, G * T, D]."""
        return self._sums / self._total
