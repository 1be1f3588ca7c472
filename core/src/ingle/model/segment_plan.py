"""What of a model its compiled segments are made for, and what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.model.decoder import Decoder, DecoderLayer
from ingle.model.feed_forward import MLP
from ingle.model.huge_pages import HugePages
from ingle.model.layers import ProjectionNorm, RMSNorm
from ingle.model.linear import Linear
from ingle.model.segment_cache import CacheForm, Sides, piece_size
from ingle.model.segment_shape import (
    EntryShape,
    HeadShape,
    LayerShape,
    SegmentShape,
    copied_bytes,
    linear_shape,
    linear_tensors,
    plain_side,
)

MAX_LAYERS = 8
"""Of a segment. Every call costs some 50 µs beside its arithmetic, and every layer some six seconds
of compiling, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShapes:
    """What to compile for a model: the first layer's entry, a segment that is called for so many
    layers at a time, one for what is left of them at the end, and the output head."""

    entry: EntryShape
    layers: SegmentShape
    last: SegmentShape
    head: HeadShape


def segment_shapes(
    model: Decoder, block_size: int, sides: Sides | None = None
) -> SegmentShapes | None:
    """What to compile for ``model`` over a cache in blocks of ``block_size`` tokens, or None when
    it is not made of what segments know. ``sides``: how the cache stores keys and values, None:
    segments are given copies of what it holds, layer by layer.

    Segments know linears that have a ``RowProduct``, one gated MLP per layer, RMS norms before the
    blocks and nothing after them, one rotation of whole heads, alike in every layer, and torch's
    attention without a bound on its logits. The embedding may be anything.
    """
    layers = known_layers(model)
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
    are_alike = sides is not None and len(set(map(window_of, layers))) == 1
    at_once, at_end = layers_at_once(len(layers)) if are_alike else (1, 1)
    return SegmentShapes(
        entry=entry,
        layers=SegmentShape(layers=(layer,) * at_once),
        last=SegmentShape(layers=(*(layer,) * (at_end - 1), last)),
        head=HeadShape(eps=model.norm.eps, lm_head=lm_head),
    )


def layers_at_once(num_layers: int) -> tuple[int, int]:
    """How many of two or more layers a segment takes, and how many are left for the last one:
    few calls a step, and not many layers to compile."""

    def cost(at_once: int) -> float:
        calls, at_end = divmod(num_layers - 1, at_once)
        return calls + (at_once + at_end + 1) / 4

    at_once = min(range(1, min(MAX_LAYERS, num_layers - 1) + 1), key=cost)
    return at_once, (num_layers - 1) % at_once + 1


def known_layers(model: Decoder) -> list[DecoderLayer]:
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
) -> LayerShape | None:
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
    return LayerShape(
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
    linears = [linear for layer in known_layers(model) for linear in _linears(layer)]
    return sum(map(copied_bytes, [*linears, model.lm_head]))


Weights = tuple[torch.Tensor, ...]


class _Giver:
    """Hands out what segments are given, piece by piece."""

    def __init__(self, model: Decoder, *, adopt: bool) -> None:
        self._model = model
        self._layers = known_layers(model)
        self._pages = HugePages()
        self._adopt = adopt

    def _linear(self, linear: Linear) -> list[torch.Tensor]:
        return linear_tensors(linear, self._pages, adopt=self._adopt)

    def entry(self, number: int = 0) -> Weights:
        """For layer ``number``'s entry."""
        layer = self._layers[number]
        attention = layer.attention
        head_norms = [n for n in (attention.q_norm, attention.k_norm) if isinstance(n, RMSNorm)]
        projection = self._linear(attention.qkv_proj)
        return (layer.input_norm.weight, *projection, *(norm.weight for norm in head_norms))

    def layer(self, number: int) -> Weights:
        """For layer ``number``, the next layer's entry included."""
        layer = self._layers[number]
        _, o_proj, gate_up_proj, down_proj = _linears(layer)
        attention = (*self._linear(o_proj), layer.post_attention_norm.weight)
        feed_forward = (*self._linear(gate_up_proj), *self._linear(down_proj))
        is_last = number + 1 == len(self._layers)
        following = () if is_last else self.entry(number + 1)
        return (*attention, *feed_forward, *following)

    def head(self) -> Weights:
        """For the output head."""
        return (self._model.norm.weight, *self._linear(self._model.lm_head))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentWeights:
    """What segments are given: for the first layer's entry, every layer, and the output head."""

    entry: Weights
    layers: tuple[Weights, ...]
    head: Weights


def segment_weights(model: Decoder) -> SegmentWeights:
    """The weights of ``model``, whose ``segment_shapes`` are not None. Where a segment reads
    another layout than the model's own, the model's is rewritten: no step may run meanwhile."""
    giver = _Giver(model, adopt=True)
    return SegmentWeights(
        entry=giver.entry(),
        layers=tuple(giver.layer(at) for at in range(len(model.layers))),
        head=giver.head(),
    )


def tried_weights(
    model: Decoder, shapes: SegmentShapes
) -> tuple[Weights, tuple[Weights, ...], tuple[Weights, ...], Weights]:
    """What the segments of ``shapes`` are given at first, one after the other, the model being left
    as it is."""
    giver = _Giver(model, adopt=False)
    number = len(model.layers)
    first = range(len(shapes.layers.layers))
    last = range(number - len(shapes.last.layers), number)
    layers, ending = (tuple(giver.layer(at) for at in run) for run in (first, last))
    return (giver.entry(), layers, ending, giver.head())


def window_of(layer: DecoderLayer) -> int | None:
    """Tokens that a known layer's attention reaches back, None for all."""
    backend = layer.attention.backend
    assert isinstance(backend, PagedCPUAttention)
    return backend.window
