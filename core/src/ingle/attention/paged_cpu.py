"""Paged attention on a CPU with torch's own flash kernel, in place where the cache allows.

Shape letters: T rows, Q query heads, H key/value heads, G = Q // H, L cached tokens, D head size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ingle.attention.layer_cache import LayerCache, turned
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.softcapped import SoftcappedAttention

WINDOW_TILE = 256
"""Rows that share a mask in windowed prefill: the mask stays below 256 x (256 + window)."""

ROWS_STEP = 64
"""Lengths of a prompt's chunk that torch's kernel sees are multiples of this, or shorter."""

Pair = tuple[torch.Tensor, torch.Tensor]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Pair:
    """torch's flash kernel on [A, B, T, D]: the output, and log-sum-exps [A, B, T]."""
    out: Pair = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, is_causal=causal, attn_mask=mask, scale=scale
    )
    return out


def _by_group(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``query`` [T, Q, D] as [H, G, T, D]."""
    num_rows, num_heads, head_dim = query.shape
    groups = num_heads // num_kv_heads
    return query.view(num_rows, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)


def _for_groups(cached: torch.Tensor, groups: int) -> torch.Tensor:
    """``cached`` [H, L, D] as [H, G, L, D] with stride 0 over G: nothing is copied."""
    return cached.unsqueeze(1).expand(-1, groups, -1, -1)


def _by_row(out: torch.Tensor) -> torch.Tensor:
    """``out`` [H, G, T, D] as [T, Q * D]."""
    return out.permute(2, 0, 1, 3).flatten(1)


class PagedCPUAttention:
    """Attention over one sequence after another.

    A decode row attends with its G query heads as G rows of one head, so that keys are read once
    per group. A prefill chunk attends causally to itself and, in a second call, to everything
    cached before it; the two are joined by their log-sum-exps, so memory does not grow with the
    context and no mask is ever built. With a sliding window that is shorter than the sequence,
    rows go in tiles, each with a mask over the keys its window can reach. Logits with a soft bound
    are none of the flash kernel's: they have a path of their own.

    Args:
        scale: Factor on the logits.
        window: Tokens a row attends to at most, itself included; None is all before it.
        softcap: Bound of the scaled logits; None leaves them.
    """

    name = "paged_cpu"
    writer: None = None

    def __init__(
        self, scale: float, window: int | None = None, softcap: float | None = None
    ) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self._softcapped = None if softcap is None else SoftcappedAttention(scale, softcap, window)

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] over what ``cache`` holds: [T, Q * D]."""
        spans = batch.spans
        if len(spans) == 1:
            return self._one(query, cache, spans[0])
        parts = [self._one(query[span.start : span.stop], cache, span) for span in spans]
        return torch.cat(parts)

    def _one(self, query: torch.Tensor, cache: LayerCache, span: SequenceSpan) -> torch.Tensor:
        back = cache.v_store.rotation
        out = self._stored(turned(query, cache.k_store.rotation), cache, span)
        return out if back is None else turned(out.view(query.shape), back.T).flatten(1)

    def _stored(self, query: torch.Tensor, cache: LayerCache, span: SequenceSpan) -> torch.Tensor:
        """``query`` [T, Q, D] turned as keys are to what is turned as values are, [T, Q * D]."""
        key, value = cache.read_stored(span)
        if self._softcapped is not None:
            return self._softcapped(query, key, value)
        window = self.window
        if span.num_new == 1:
            if window is not None and window < span.seq_len:
                key, value = key[:, -window:], value[:, -window:]
            return self._decode(query, key, value)
        if window is not None and window < span.seq_len:
            return self._windowed(query, key, value, window)
        return self._prefill(query, key, value, span.num_cached)

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = query.view(1, key.shape[0], -1, query.shape[-1])
        out, _ = _flash(rows, key.unsqueeze(0), value.unsqueeze(0), self.scale)
        return out.reshape(1, -1)

    def _prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_cached: int
    ) -> torch.Tensor:
        rows = _by_group(query, key.shape[0])
        k, v = _for_groups(key, rows.shape[1]), _for_groups(value, rows.shape[1])
        out, lse = self._own(rows, key[:, num_cached:], value[:, num_cached:])
        if num_cached:
            before = _flash(rows, k[:, :, :num_cached], v[:, :, :num_cached], self.scale)
            out = _join(out, lse, *before)
        return _by_row(out)

    def _own(self, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """``rows`` [H, G, T, D] over their own T keys [H, T, D], each up to itself.

        torch keeps 0.1 to 0.3 MB for every length it has seen, and never drops any. So the length
        is rounded up; no row looks at the keys added behind it.
        """
        num_rows, groups = rows.shape[2], rows.shape[1]
        missing = -num_rows % ROWS_STEP if num_rows > ROWS_STEP else 0
        if missing:
            rows, key, value = (pad(t, (0, 0, 0, missing)) for t in (rows, key, value))
        k, v = _for_groups(key, groups), _for_groups(value, groups)
        out, lse = _flash(rows, k, v, self.scale, causal=True)
        return out[:, :, :num_rows], lse[:, :, :num_rows]

    def _windowed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> torch.Tensor:
        num_cached = key.shape[1] - query.shape[0]
        tiles = []
        for start in range(0, query.shape[0], WINDOW_TILE):
            rows = query[start : start + WINDOW_TILE]
            stop = num_cached + start + rows.shape[0]
            first = max(0, num_cached + start - window + 1)
            tiles.append(self._tile(rows, key[:, first:stop], value[:, first:stop], window))
        return torch.cat(tiles)

    def _tile(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> torch.Tensor:
        """The last T of the L keys' rows, each over at most ``window`` keys up to itself."""
        num_rows, length = query.shape[0], key.shape[1]
        at = torch.arange(length - num_rows, length)[:, None]
        columns = torch.arange(length)[None, :]
        hidden = (columns > at) | (columns <= at - window)
        mask = torch.zeros(num_rows, length, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        rows = _by_group(query, key.shape[0])
        k, v = _for_groups(key, rows.shape[1]), _for_groups(value, rows.shape[1])
        return _by_row(_flash(rows, k, v, self.scale, mask=mask)[0])


def _join(
    out: torch.Tensor, lse: torch.Tensor, out_before: torch.Tensor, lse_before: torch.Tensor
) -> torch.Tensor:
    """Joins two partial attentions; ``out`` [H, G, T, D], ``lse`` [H, G, T] (natural log)."""
    share = torch.sigmoid(lse - lse_before).unsqueeze(-1)
    return torch.lerp(out_before.float(), out.float(), share.float()).to(out.dtype)
