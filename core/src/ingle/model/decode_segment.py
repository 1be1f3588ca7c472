"""One decode step of some layers as a plain function, for torch's compiler.

A segment goes from one layer's queries, keys and values to those of a later one: cache write,
attention, output projection, feed-forward, and the next layer's projection and rotation, as many
times as it has layers. Compiled ahead of time that is one C++ kernel that streams the weights once;
run eagerly a layer is some thirty operator calls, each of which finds its code evicted from the
processor's caches by the weights in between. The last segment of layers ends with the last one's
output, and the output head is a segment of its own.

Shape letters: E hidden size, I intermediate size, Q query heads, H key/value heads, D head size,
B blocks of the cache, S tokens in a block, N blocks of the sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ingle.model.segment_shape import (
    EntryShape,
    HeadShape,
    LayerShape,
    LinearShape,
    SegmentShape,
    SideShape,
    named_function,
    row_function,
)

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Turned queries and keys [Q + H, D] and values [H, D] in the activation dtype; the residual
float32 [E]; cosines and signed sines [D], the token's row of ``RotaryTable``."""
Rows = tuple[torch.Tensor, ...]
Stored = tuple[Rows, Rows, Rows, Rows]
"""What stores a layer's keys, each tensor [H, B, S, ...], and values; the constants of both."""
Place = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The sequence's blocks int64 [N], and two tensors of which only the length counts: the sequence
begins ``len(before) - MIN_LENGTH`` tokens into its first block and has ``len(tokens)`` tokens, this
one included."""

MIN_LENGTH = 2
"""The least length of a dimension that the compiler does not take for a constant."""


class DecodeSegment(torch.nn.Module):
    """The function; a module only because ``torch.export`` wants one."""

    def __init__(self, shape: SegmentShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self,
        state: State,
        stored: Sequence[Stored],
        place: Place,
        weights: Sequence[Sequence[torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """From one layer's queries, keys and values to those of the one after the last, for one
        token.

        Args:
            state: See ``State``.
            stored: Each layer's; the token's keys and values are written into it.
            place: See ``Place``; the same in every layer.
            weights: Each layer's: what ``LayerShape`` names, in its order, see
                ``compiled_decoder``.

        Returns:
            The residual float32 [E], turned queries and keys [Q + H, D] and values [H, D], both in
            the activation dtype; after the model's last layer its output alone, [E] in that dtype.
        """
        turned, value, residual, cos, sin = state
        out: tuple[torch.Tensor, ...] = (residual, turned, value)
        for shape, own, tensors in zip(self.shape.layers, stored, weights, strict=True):
            residual, turned, value = out
            state = (turned, value, residual, cos, sin)
            out = _layer(shape, state, (*own, *place), iter(tensors))
        return out


Cache = tuple[Rows, Rows, Rows, Rows, torch.Tensor, torch.Tensor, torch.Tensor]
"""A layer's ``Stored`` and ``Place``."""


def _layer(
    shape: LayerShape, state: State, cache: Cache, feed: Iterator[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """``DecodeSegment`` for one layer, whose weights come next from ``feed``."""
    turned, value, residual, cos, sin = state
    attended = _attend(shape, turned, value, cache)
    x = residual + _linear(shape.o_proj, feed, attended)
    both = _linear(shape.gate_up_proj, feed, *_weighted(x, next(feed), shape.eps))
    gate, up = both[: shape.intermediate_size], both[shape.intermediate_size :]
    x = x + _linear(shape.down_proj, feed, torch.nn.functional.silu(gate) * up)
    if shape.following is None:
        return (x.to(cos.dtype),)
    return (x, *_enter(shape.following, feed, x, (cos, sin)))


def _attend(
    shape: LayerShape, turned: torch.Tensor, value: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """Attention's output float32 [Q * D]."""
    keys, values, k_constants, v_constants, blocks, before, tokens = cache
    start, length = before.shape[0] - MIN_LENGTH, tokens.shape[0]
    slot = (torch.arange(shape.num_kv_heads), blocks[-1:], _slot(start + length, shape))
    _store(shape.k_side, keys, turned[shape.num_heads :], slot, k_constants)
    _store(shape.v_side, values, value, slot, v_constants)
    at = torch.arange(blocks.shape[0] * shape.block_size).view(-1, shape.block_size)
    is_read = (at >= start) & (at < start + length)
    groups = shape.num_heads // shape.num_kv_heads
    query = turned[: shape.num_heads].float() * shape.scale
    if shape.k_side.is_rotated:
        query = query @ k_constants[0]
    query = query.view(shape.num_kv_heads, groups, 1, 1, shape.head_dim)
    key = _read(shape.k_side, keys, blocks, k_constants)
    # What a failed request left behind the sequence's end may be no number, and 0 * NaN is not 0.
    value = _read(shape.v_side, values, blocks, v_constants)
    value = torch.where(is_read.unsqueeze(-1), value, 0.0)
    # Written out for every head of a group, so that one loop over the keys serves them all.
    logits = [(query[:, g] * key).sum(-1) for g in range(groups)]
    logits = [torch.where(is_read, one, -torch.inf) for one in logits]
    shares = [torch.exp(one - one.amax((1, 2), keepdim=True)) for one in logits]
    shares = [one * one.sum((1, 2), keepdim=True).reciprocal() for one in shares]
    outs = [(one.unsqueeze(-1) * value).sum((1, 2)) for one in shares]
    out = torch.stack(outs, 1)
    return (out @ v_constants[0].T if shape.v_side.is_rotated else out).reshape(-1)


class DecodeEntry(torch.nn.Module):
    """The first layer up to its attention."""

    def __init__(self, shape: EntryShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x`` [E] to itself in float32, turned queries and keys [Q + H, D] and values [H, D], all
        else in the dtype of ``cos`` and ``sin`` [D]; ``weights``: the norm's, the projection's, the
        head norms'."""
        x = x.float()
        return (x, *_enter(self.shape, iter(weights), x, (cos, sin)))


class DecodeHead(torch.nn.Module):
    """The final norm and the output head."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """``x`` [E], the last layer's output, to float32 [V]; ``weights``: the norm's, then those
        of the head."""
        feed = iter(weights)
        x, factor = _weighted(x.float(), next(feed), self.shape.eps)
        return _linear(self.shape.lm_head, feed, x, factor)


def _enter(
    shape: EntryShape,
    feed: Iterator[torch.Tensor],
    x: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer up to its attention, see ``DecodeEntry``; its tensors come next from ``feed``."""
    cos, sin = turn
    x, factor = _weighted(x, next(feed), shape.eps)
    heads = _linear(shape.qkv_proj, feed, x, factor).view(-1, shape.head_dim)
    turning, half = shape.num_heads + shape.num_kv_heads, shape.head_dim // 2
    turned = heads[:turning]
    if shape.has_head_norms:
        query = _norm(turned[: shape.num_heads], next(feed), shape.eps)
        key = _norm(turned[shape.num_heads :], next(feed), shape.eps)
        turned = torch.cat((query, key))
    one, other = turned[:, :half], turned[:, half:]
    one, other = (
        (one * cos[:half].float() + other * sin[:half].float()).to(cos.dtype),
        (other * cos[half:].float() + one * sin[half:].float()).to(cos.dtype),
    )
    return torch.cat((one, other), 1), heads[turning:].to(cos.dtype)


def _store(side: SideShape, stored: Rows, row: torch.Tensor, slot: Rows, constants: Rows) -> None:
    """Puts a token's ``row`` [H, D] into ``slot``."""
    rows = named_function(side.write)(row, constants)
    for tensor, part in zip(stored, rows, strict=True):
        tensor.index_put_(slot, part)


def _read(side: SideShape, stored: Rows, blocks: torch.Tensor, constants: Rows) -> torch.Tensor:
    """What ``blocks`` int64 [N] hold: float32 [H, N, S, D]."""
    rows = tuple(tensor[:, blocks] for tensor in stored)
    found: torch.Tensor = named_function(side.read)(rows, constants)
    return found


def _slot(end: int, shape: LayerShape) -> torch.Tensor:
    """Where in its block the token before place ``end`` lies, int64 [1]."""
    return torch.full((1,), (end - 1) % shape.block_size)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _weighted(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """An RMS norm of ``x`` float32 [E] in two parts, whose product it is: ``x`` times ``weight``,
    and a factor [1]. A product can begin with the first before the second is known."""
    return x * weight.float(), torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _linear(
    shape: LinearShape,
    feed: Iterator[torch.Tensor],
    x: torch.Tensor,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` float32 [K], times ``factor`` [1], through a linear whose tensors come next from
    ``feed``: float32 [N]."""
    x = _stored(x)
    outs = []
    for part in shape.parts:
        row = x
        if part.scale_dtype:
            row = row * next(feed).float()
        if part.is_ordered:
            row = row[next(feed)]
        tensors = [next(feed) for _ in part.tensors]
        row = row if row is x else _stored(row)
        outs.append(row_function(part.function)(tensors, row)[: part.out_features])
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if factor is not None:
        out = out * factor
    return out + next(feed).float() if shape.has_bias else out


def _stored(x: torch.Tensor) -> torch.Tensor:
    """``x`` [K], written to memory once: otherwise the compiler may compute it anew in every
    iteration of the product that reads it."""
    return torch.as_strided(x.contiguous(), x.shape, (1,))
