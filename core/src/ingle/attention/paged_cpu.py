"""Paged attention on a CPU with torch's own flash kernel, in place where the cache allows.

Shape letters: T rows, Q query heads, H key/value heads, G = Q // H, L cached tokens, D head size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ingle.attention.joined import JOINED
from ingle.attention.layer_cache import LayerCache, turned
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.prompt_products import PromptProducts
from ingle.attention.row_attention import RowAttention, RowTable, is_plain, plain_tensors
from ingle.attention.softcapped import SoftcappedAttention
from ingle.plugin.compiled_function import MIN_SIZE, CompiledFunction

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
    """``out`` [H, G, T, D] as [T, Q, D]; in place when it is the output for a ``query`` of
    ``_by_group``, which torch lays out alike."""
    return out.permute(2, 0, 1, 3).flatten(1, 2)


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
        rows: Serves steps of one token for each of several sequences, once it is compiled, where
            the cache is stored as it is; None: sequences go one after another.

    Attributes:
        joined: Joins two calls of a chunk; core may compile it for bfloat16.
        products: Serves prompts in bfloat16 in place of the flash kernel, once it is compiled.
    """

    name = "paged_cpu"
    writer: None = None

    def __init__(
        self,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        rows: RowAttention | None = None,
    ) -> None:
        self.rows = rows
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.joined = CompiledFunction(JOINED)
        self.products = PromptProducts(scale)
        self._softcapped = None if softcap is None else SoftcappedAttention(scale, softcap, window)

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] over what ``cache`` holds: [T, Q * D]; rows past the last span may
        hold anything finite."""
        if self.rows is not None and self._is_rows(query, cache, batch):
            return self._all_rows(self.rows, query, cache, batch)
        *others, last = batch.spans
        parts = [self._one(query[one.start : one.stop], cache, one) for one in others]
        parts.append(self._padded(query[last.start :] if others else query, cache, last))
        return torch.cat(parts) if others else parts[0]

    def _is_rows(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> bool:
        """Whether a single call serves the batch."""
        if self.rows is None or not self.rows.function.is_compiled or len(batch.spans) < MIN_SIZE:
            return False
        longest = max(span.seq_len for span in batch.spans)
        is_whole = self.window is None or self.window >= longest
        are_single = all(span.num_new == 1 for span in batch.spans)
        return is_whole and are_single and query.dtype is torch.bfloat16 and is_plain(cache)

    def _all_rows(
        self, rows: RowAttention, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch
    ) -> torch.Tensor:
        table = batch.made.get(RowTable.name)
        if not isinstance(table, RowTable):
            table = RowTable(batch.spans, cache.k_store.geometry.block_size)
            batch.made[RowTable.name] = table
        keys, values = plain_tensors(cache)
        num_rows = len(batch.spans)
        out = rows(query[:num_rows], keys, values, table)
        return out if num_rows == query.shape[0] else pad(out, (0, 0, 0, query.shape[0] - num_rows))

    def _padded(self, query: torch.Tensor, cache: LayerCache, span: SequenceSpan) -> torch.Tensor:
        """``_one`` with rows behind those of ``span``."""
        num_rows, num_new = query.shape[0], span.num_new
        if num_rows == num_new or self._has_prefill(span):
            return self._one(query, cache, span)
        return pad(self._one(query[:num_new], cache, span), (0, 0, 0, num_rows - num_new))

    def _has_prefill(self, span: SequenceSpan) -> bool:
        is_wide = self.window is None or self.window >= span.seq_len
        return self._softcapped is None and span.num_new > 1 and is_wide

    def _one(self, query: torch.Tensor, cache: LayerCache, span: SequenceSpan) -> torch.Tensor:
        back = cache.v_store.rotation
        out = self._stored(turned(query, cache.k_store.rotation), cache, span)
        return out if back is None else turned(out.view(query.shape), back.T).flatten(1)

    def _stored(self, query: torch.Tensor, cache: LayerCache, span: SequenceSpan) -> torch.Tensor:
        """``query`` [T, Q, D] turned as keys are to what is turned as values are, [T, Q * D]."""
        key, value = cache.read_stored(span)
        window = self.window
        if self._softcapped is not None:
            return self._softcapped(query, key, value)
        if self._has_prefill(span):
            return self._prefill(query, key, value, span.num_cached)
        if span.num_new > 1:
            assert window is not None
            return self._windowed(query, key, value, window)
        if window is not None and window < span.seq_len:
            key, value = key[:, -window:], value[:, -window:]
        return self._decode(query, key, value)

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = query.view(1, key.shape[0], -1, query.shape[-1])
        out, _ = _flash(rows, key.unsqueeze(0), value.unsqueeze(0), self.scale)
        return out.reshape(1, -1)

    def _prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_cached: int
    ) -> torch.Tensor:
        """``query`` has as many rows as there are keys behind ``num_cached``, or more."""
        out, lse = self._own(query, key[:, num_cached:], value[:, num_cached:])
        if not num_cached:
            return out.flatten(1)
        rows = _by_group(query, key.shape[0])
        k, v = (_for_groups(one[:, :num_cached], rows.shape[1]) for one in (key, value))
        before, lse_before = self._whole(rows, k, v)
        parts = (out, lse, _by_row(before), lse_before.flatten(0, 1))
        both = torch.empty(out.shape, dtype=out.dtype)
        self.joined(*(part.contiguous() for part in parts), both)
        return both.flatten(1)

    def _own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """``query`` [T, Q, D] over the same rows' keys [H, T, D], or those of the first rows, each
        up to itself: the output [T, Q, D], and log-sum-exps [Q, T].

        torch keeps 0.1 to 0.3 MB for every length it has seen, and never drops any. So the length
        is rounded up; no row looks at the keys added behind it.
        """
        num_rows, num_heads = query.shape[0], key.shape[0]
        length = num_rows if num_rows <= ROWS_STEP else -(-num_rows // ROWS_STEP) * ROWS_STEP
        if length > num_rows:
            query = pad(query, (0, 0, 0, 0, 0, length - num_rows))
        if length > key.shape[1]:
            key, value = (pad(one, (0, 0, 0, length - key.shape[1])) for one in (key, value))
        rows = _by_group(query, num_heads)
        k, v = _for_groups(key, rows.shape[1]), _for_groups(value, rows.shape[1])
        out, lse = self._whole(rows, k, v, causal=True)
        return _by_row(out)[:num_rows], lse.flatten(0, 1)[:, :num_rows]

    def _whole(
        self, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
    ) -> Pair:
        """``_flash`` of a prompt's rows, by whichever is faster."""
        if self.products.serves(rows, key):
            return self.products(rows, key, value, causal=causal)
        return _flash(rows, key, value, self.scale, causal=causal)

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
        return _by_row(_flash(rows, k, v, self.scale, mask=mask)[0]).flatten(1)
