"""A decoder whose single-token steps run through compiled segments; all else as before.

Shape letters: E hidden size, Q query heads, H key/value heads, D head size, B blocks, S tokens in
a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.model.decode_segment import MIN_LENGTH
from ingle.model.decoder import Decoder, DecoderLayer
from ingle.model.feed_forward import MLP
from ingle.model.huge_pages import HugePages
from ingle.model.layers import ProjectionNorm, RMSNorm
from ingle.model.linear import Linear
from ingle.model.rotary import RotaryTable
from ingle.model.segment_cache import CacheForm, Sides, Storage, piece_size, storage_of
from ingle.model.segment_package import CompiledSegment, place
from ingle.model.segment_shape import (
    EntryShape,
    HeadShape,
    SegmentShape,
    copied_bytes,
    linear_shape,
    linear_tensors,
    plain_side,
)

NULL_BLOCK = 0
"""Block 0 belongs to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShapes:
    """What to compile for a model: the first layer's entry, a segment that all layers but the last
    share, the last layer's, and the output head."""

    entry: EntryShape
    layer: SegmentShape
    last: SegmentShape
    head: HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The same, compiled."""

    entry: CompiledSegment
    layer: CompiledSegment
    last: CompiledSegment
    head: CompiledSegment


def segment_shapes(
    model: Decoder, block_size: int, sides: Sides | None = None
) -> SegmentShapes | None:
    """What to compile for ``model`` over a cache in blocks of ``block_size`` tokens, or None when
    it is not made of what segments know. ``sides``: how the cache stores keys and values, None:
    as they are.

    Segments know linears that have a ``RowProduct``, one gated MLP per layer, RMS norms before the
    blocks and nothing after them, one rotation of whole heads, alike in every layer, and torch's
    attention without a bound on its logits. The embedding may be anything.
    """
    layers = _known_layers(model)
    table = model.rotaries[0]
    if len(layers) < 2 or len(model.rotaries) != 1 or table is None:
        return None
    if model.embedding_multiplier != 1 or type(model.norm) is not RMSNorm:
        return None
    form = CacheForm(block_size=block_size, sides=sides)
    shapes = {_layer_shape(one, following, form) for one, following in pairwise(layers)}
    entry, last = _entry_shape(layers[0]), _layer_shape(layers[-1], None, form)
    lm_head, layer = linear_shape(model.lm_head), shapes.pop()
    if shapes or entry is None or layer is None or last is None or lm_head is None:
        return None
    if table.cos.shape[1] != layer.head_dim:
        return None
    head = HeadShape(eps=model.norm.eps, lm_head=lm_head)
    return SegmentShapes(entry=entry, layer=layer, last=last, head=head)


def _known_layers(model: Decoder) -> list[DecoderLayer]:
    """The model's layers when every one is of the kind that segments know, else none."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    return layers if len(layers) == len(model.layers) else []


def _entry_shape(layer: DecoderLayer) -> EntryShape | None:
    attention = layer.attention
    norms = [n for n in (layer.input_norm, attention.q_norm, attention.k_norm) if n is not None]
    qkv_proj = linear_shape(attention.qkv_proj)
    if not _are_alike(norms) or qkv_proj is None:
        return None
    return EntryShape(
        num_heads=attention.shape.num_heads,
        num_kv_heads=attention.shape.num_kv_heads,
        head_dim=attention.shape.head_dim,
        eps=layer.input_norm.eps,
        has_head_norms=attention.q_norm is not None,
        qkv_proj=qkv_proj,
    )


def _layer_shape(
    layer: DecoderLayer, following: DecoderLayer | None, form: CacheForm
) -> SegmentShape | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, MLP) or mlp.activation is not torch.nn.functional.silu:
        return None
    backend = attention.backend
    if not isinstance(backend, PagedCPUAttention) or backend.softcap is not None:
        return None
    entry = None if following is None else _entry_shape(following)
    o_proj, gate_up_proj, down_proj = map(
        linear_shape, (attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    )
    if o_proj is None or gate_up_proj is None or down_proj is None:
        return None
    if not _are_alike([layer.post_attention_norm]) or (following is not None and entry is None):
        return None
    heads = attention.shape
    plain = plain_side(heads.head_dim)
    keys, values = form.sides or (plain, plain)
    return SegmentShape(
        hidden_size=o_proj.out_features,
        intermediate_size=down_proj.in_features,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        eps=layer.post_attention_norm.eps,
        scale=backend.scale,
        block_size=piece_size(form.block_size),
        k_side=keys,
        v_side=values,
        o_proj=o_proj,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        following=entry,
    )


def _are_alike(norms: Sequence[RMSNorm | ProjectionNorm]) -> bool:
    """Whether all of ``norms`` are of the plain kind, with one epsilon."""
    plain = [norm for norm in norms if type(norm) is RMSNorm]
    return len(plain) == len(norms) and len({norm.eps for norm in plain}) == 1


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP)
    return (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)


def extra_bytes(model: Decoder) -> int:
    """Bytes of the copies that segments read; ``segment_shapes`` of it is not None."""
    linears = [linear for layer in _known_layers(model) for linear in _linears(layer)]
    return sum(map(copied_bytes, [*linears, model.lm_head]))


def _entry_weights(model: Decoder, pages: HugePages, number: int = 0) -> list[torch.Tensor]:
    """What layer ``number``'s entry is given."""
    layer = _known_layers(model)[number]
    attention = layer.attention
    head_norms = [n for n in (attention.q_norm, attention.k_norm) if isinstance(n, RMSNorm)]
    projection = linear_tensors(attention.qkv_proj, pages)
    return [layer.input_norm.weight, *projection, *(norm.weight for norm in head_norms)]


def _layer_weights(model: Decoder, pages: HugePages, number: int) -> list[torch.Tensor]:
    """What layer ``number``'s segment is given, the next layer's entry included."""
    layer = _known_layers(model)[number]
    _, o_proj, gate_up_proj, down_proj = _linears(layer)
    weights = [*linear_tensors(o_proj, pages), layer.post_attention_norm.weight]
    weights += [*linear_tensors(gate_up_proj, pages), *linear_tensors(down_proj, pages)]
    is_last = number + 1 == len(model.layers)
    return weights if is_last else [*weights, *_entry_weights(model, pages, number + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentWeights:
    """What each segment is given: the first layer's entry, every layer, and the output head."""

    entry: list[torch.Tensor]
    layers: list[list[torch.Tensor]]
    head: list[torch.Tensor]


def segment_weights(model: Decoder) -> SegmentWeights:
    """The weights of ``model``, whose ``segment_shapes`` are not None; copies where a segment reads
    another layout than the model's own."""
    pages = HugePages()
    return SegmentWeights(
        entry=_entry_weights(model, pages),
        layers=[_layer_weights(model, pages, at) for at in range(len(model.layers))],
        head=[model.norm.weight, *linear_tensors(model.lm_head, pages)],
    )


class CompiledDecoder:
    """``model`` with a faster path for a batch of one token.

    Args:
        model: The decoder; ``segment_shapes`` of it is what ``segments`` were compiled for.
        segments: Loaded and found right on this machine.
        weights: ``segment_weights(model)``.
        in_place: Whether ``segments`` read the cache as it is stored, not copies.
    """

    def __init__(
        self,
        model: Decoder,
        segments: Segments,
        weights: SegmentWeights,
        *,
        in_place: bool = True,
    ) -> None:
        table = model.rotaries[0]
        assert table is not None
        self._model = model
        self._segments = segments
        self._layers = _known_layers(model)
        self._rotary: RotaryTable = table
        self._storages: dict[int, Storage | None] = {}
        self._weights = weights
        self._in_place = in_place

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.logits``."""
        if hidden.shape[0] != 1:
            return self._model.logits(hidden)
        (logits,) = self._segments.head([hidden[0].float(), *self._weights.head])
        # A copy: the package writes its next result into the same memory.
        return self._model.bounded(logits.unsqueeze(0).clone())

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.normed``."""
        return self._model.normed(hidden)

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """As ``Decoder.hidden_states``; one token goes through the compiled segments."""
        if batch.token_ids.shape[0] != 1 or batch.spans[0].seq_len < MIN_LENGTH:
            return self._model.hidden_states(batch, caches)
        return self._one_token(batch, caches)

    def _one_token(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        x = self._model.embedding[batch.token_ids]
        cos, sin = (part.view(-1) for part in self._rotary.at(batch.positions))
        residual = x[0].float()
        turned, value = self._segments.entry([residual, cos, sin, *self._weights.entry])
        segment, last = self._segments.layer, len(self._layers) - 1
        places = _Places(batch.spans[0])
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            storage = self._storage(number, cache)
            if storage is None:
                key = turned[layer.attention.shape.num_heads :]
                where = _copies(layer, cache, batch, key, value)
            else:
                where = places.of(layer, storage)
            inputs = [turned, value, residual, cos, sin, *where, *self._weights.layers[number]]
            if number < last:
                residual, turned, value = segment(inputs)
        (residual,) = self._segments.last(inputs)
        return residual.to(x.dtype).unsqueeze(0)

    def _storage(self, number: int, cache: LayerCache) -> Storage | None:
        """Layer ``number``'s storage, asked for once."""
        if number not in self._storages:
            self._storages[number] = storage_of(cache) if self._in_place else None
        return self._storages[number]


Places = tuple[torch.Tensor, ...]
"""A segment's ``Cache``."""


class _Places:
    """Where a step's sequence lies in the layers' own storage."""

    def __init__(self, span: SequenceSpan) -> None:
        self._span = span
        self._by_window: dict[int | None, Places] = {}

    def of(self, layer: DecoderLayer, storage: Storage) -> Places:
        """The layer's ``Cache``."""
        window = _window(layer)
        if window not in self._by_window:
            self._by_window[window] = self._place(_skipped(layer, self._span), storage)
        return (*storage.tensors, *self._by_window[window])

    def _place(self, skipped: int, storage: Storage) -> Places:
        length, size = self._span.seq_len, storage.piece
        per_block = storage.block_size // size
        blocks = torch.tensor(self._span.block_table[: -(-length // storage.block_size)])
        pieces = blocks[:, None] * per_block + torch.arange(per_block)
        used, start = pieces.view(-1)[skipped // size : -(-length // size)], skipped % size
        if used.shape[0] < MIN_LENGTH:
            used, start = torch.cat((torch.tensor([NULL_BLOCK]), used)), start + size
        return (used, *place(start, length - skipped))


def _copies(
    layer: DecoderLayer,
    cache: LayerCache,
    batch: ForwardBatch,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Places:
    """Copies of what the cache gives to read, the token's own ``key`` and ``value`` [H, D] having
    been stored before."""
    span = batch.spans[0]
    cache.write(key.unsqueeze(0), value.unsqueeze(0), batch.slot_mapping)
    skipped = _skipped(layer, span)
    length, size = span.seq_len - skipped, piece_size(cache.k_store.geometry.block_size)
    start = size if length <= size else 0
    keys, values = (_in_blocks(side[:, skipped:], start, size) for side in cache.read(span))
    return (keys, values, torch.arange(keys.shape[1]), *place(start, length))


def _in_blocks(side: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """``side`` [H, L, D] as [H, B, S, D], contiguous, from place ``start`` on."""
    padded = torch.nn.functional.pad(side, (0, 0, start, -side.shape[1] % size))
    return padded.contiguous().view(side.shape[0], -1, size, side.shape[2])


def _window(layer: DecoderLayer) -> int | None:
    backend = layer.attention.backend
    assert isinstance(backend, PagedCPUAttention)
    return backend.window


def _skipped(layer: DecoderLayer, span: SequenceSpan) -> int:
    """Tokens at the start of a sequence that a layer's window no longer reaches."""
    window = _window(layer)
    return 0 if window is None else max(0, span.seq_len - window)
