"""Attention in plain PyTorch, in float32: the oracle of tests, and the fallback on any device.

Shape letters: T rows, Q query heads, H key/value heads, L cached tokens, D head size.
"""

from __future__ import annotations

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the last T of L tokens over all of them.

    Args:
        query: [T, Q, D].
        key: [H, L, D]; Q is a multiple of H.
        value: [H, L, D].
        scale: Factor on the logits.
        window: Tokens a row attends to at most, itself included; None is all before it.
        softcap: Bound of the scaled logits, ``softcap * tanh(x / softcap)``; None leaves them.

    Returns:
        [T, Q, D] in ``query``'s dtype.
    """
    num_rows, num_heads, _ = query.shape
    groups = num_heads // key.shape[0]
    k = key.float().repeat_interleave(groups, 0)
    v = value.float().repeat_interleave(groups, 0)
    logits = torch.einsum("tqd,qld->qtl", query.float(), k) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    length = k.shape[1]
    rows = torch.arange(length - num_rows, length, device=query.device)[:, None]
    columns = torch.arange(length, device=query.device)[None, :]
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("qtl,qld->tqd", weights, v).to(query.dtype)


class ReferenceAttention:
    """Gathers each sequence's keys and values and attends in float32."""

    name = "reference"
    writer: None = None

    def __init__(
        self, scale: float, window: int | None = None, softcap: float | None = None
    ) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] over what ``cache`` holds: [T, Q * D]."""
        parts = []
        for span in batch.spans:
            key, value = cache.read(span)
            rows = query[span.start : span.stop]
            parts.append(attend(rows, key, value, self.scale, self.window, self.softcap))
        return torch.cat(parts).flatten(1)
