"""A decoder whose single-token steps run through compiled segments; all else as before.

Shape letters: E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.model.decode_segment import SegmentShape, Weights
from ingle.model.decoder import Decoder, DecoderLayer
from ingle.model.feed_forward import MLP
from ingle.model.layers import RMSNorm
from ingle.model.linear import Linear
from ingle.model.rotary import RotaryTable, rotate
from ingle.model.segment_package import CompiledSegment

MAX_EXTRA_BYTES = 2 * 1024**3
"""A compiled segment reads plain matrices, beside the packed ones that prompts use. Above this
size the copies cost more than they bring: such models are bound by memory bandwidth anyway."""


def segment_shape(model: Decoder) -> SegmentShape | None:
    """What to compile for ``model``, or None when it is not made of what segments know.

    Segments know bias-free 16-bit matrices without per-head norms, one gated MLP per layer, norms
    before the blocks and nothing after them, and one rotation of whole heads, alike in every
    layer. Attention, embedding and output head run outside of them and may be anything.
    """
    layers = _known_layers(model)
    shapes = {_layer_shape(layer) for layer in layers}
    if len(shapes) != 1 or len(layers) < 2:
        return None
    shape = shapes.pop()
    if shape is None or len(model.rotaries) != 1 or model.embedding_multiplier != 1:
        return None
    turning = model.rotaries[0]
    return shape if turning is not None and turning.cos.shape[1] == shape.head_dim else None


def _known_layers(model: Decoder) -> list[DecoderLayer]:
    """The model's layers when every one is of the kind that segments know, else none."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    return layers if len(layers) == len(model.layers) else []


def _layer_shape(layer: DecoderLayer) -> SegmentShape | None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, MLP) or mlp.activation is not torch.nn.functional.silu:
        return None
    if attention.q_norm is not None or attention.k_norm is not None:
        return None
    if type(layer.input_norm) is not RMSNorm or type(layer.post_attention_norm) is not RMSNorm:
        return None
    if not all(_is_plain(linear) for linear in _linears(layer)):
        return None
    heads = attention.shape
    return SegmentShape(
        hidden_size=layer.input_norm.weight.shape[0],
        intermediate_size=mlp.down_proj.parts[0].weight.in_features,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        eps=layer.input_norm.eps,
    )


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP)
    return (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)


def _is_plain(linear: Linear) -> bool:
    """One bias-free part that dequantises to bf16: dense, in any layout."""
    if len(linear.parts) != 1 or linear.bias is not None:
        return False
    weight = linear.parts[0].weight
    tensors = list(weight.tensors().values())
    return (
        len(tensors) == 1
        and tensors[0].dtype is torch.bfloat16
        and tensors[0].shape == (weight.out_features, weight.in_features)
    )


def extra_bytes(model: Decoder) -> int:
    """Bytes the plain copies of ``model``'s matrices take; ``segment_shape(model)`` is not None."""
    return sum(_bytes(layer) for layer in _known_layers(model))


def _bytes(layer: DecoderLayer) -> int:
    return sum(
        2 * part.weight.out_features * part.weight.in_features
        for linear in _linears(layer)
        for part in linear.parts
    )


class CompiledDecoder:
    """``model`` with a faster path for a batch of one token.

    Args:
        model: The decoder; ``segment_shape(model)`` is what ``segment`` was compiled for.
        segment: Loaded and found right on this machine.
    """

    def __init__(self, model: Decoder, segment: CompiledSegment) -> None:
        table = model.rotaries[0]
        assert table is not None
        self._model = model
        self._segment = segment
        self._layers = _known_layers(model)
        self._rotary: RotaryTable = table
        self._weights = [
            _weights(one, other) for one, other in zip(self._layers, self._layers[1:], strict=False)
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.logits``."""
        return self._model.logits(hidden)

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """As ``Decoder.hidden_states``; one token goes through the compiled segments."""
        if batch.token_ids.shape[0] != 1:
            return self._model.hidden_states(batch, caches)
        return self._one_token(batch, caches)

    def _one_token(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        layers, segment = self._layers, self._segment
        x = self._model.embedding[batch.token_ids]
        turn = self._rotary.at(batch.positions)
        turned, value = _enter(layers[0], x, turn)
        residual, cos, sin = x[0].float(), turn[0].view(-1), turn[1].view(-1)
        for layer, cache, weights in zip(layers, caches, self._weights, strict=False):
            attended = _attend(layer, turned, value, cache, batch)
            inputs = [attended.view(-1), residual, cos, sin, *weights]
            residual, turned, value = segment(inputs)
            turned, value = turned.unsqueeze(0), value.unsqueeze(0)
        last = layers[-1]
        attended = _attend(last, turned, value, caches[-1], batch)
        x = last.attention.o_proj(attended, residual.to(x.dtype).unsqueeze(0))
        return last.mlp(last.post_attention_norm(x), x)


def _enter(
    layer: DecoderLayer, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer up to its attention: turned queries and keys [1, Q + H, D], values [1, H, D]."""
    attention = layer.attention
    heads = attention.qkv_proj(layer.input_norm(x)).view(1, -1, attention.shape.head_dim)
    turning = attention.shape.num_heads + attention.shape.num_kv_heads
    return rotate(heads[:, :turning], *turn), heads[:, turning:]


def _attend(
    layer: DecoderLayer,
    turned: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
) -> torch.Tensor:
    num_heads = layer.attention.shape.num_heads
    cache.write(turned[:, num_heads:], value, batch.slot_mapping)
    return layer.attention.backend(turned[:, :num_heads], cache, batch)


def _weights(layer: DecoderLayer, following: DecoderLayer) -> Weights:
    _, o_proj, gate_up_proj, down_proj = _linears(layer)
    return (
        _matrix(o_proj),
        layer.post_attention_norm.weight,
        _matrix(gate_up_proj),
        _matrix(down_proj),
        following.input_norm.weight,
        _matrix(following.attention.qkv_proj),
    )


def _matrix(linear: Linear) -> torch.Tensor:
    """The weight as a plain [N, K] bf16 matrix."""
    return linear.parts[0].weight.dequantize().contiguous()
