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
from ingle.model.linear import Linear
from ingle.model.rotary import rotate
from ingle.model.segment_package import CompiledSegment

MAX_EXTRA_BYTES = 2 * 1024**3
"""A compiled segment reads plain matrices, beside the packed ones that prompts use. Above this
size the copies cost more than they bring: such models are bound by memory bandwidth anyway."""


def segment_shape(model: Decoder) -> SegmentShape | None:
    """What to compile for ``model``, or None when it is not made of what segments know.

    Segments know bias-free 16-bit matrices without per-head norms, alike in every layer.
    """
    shapes = {_layer_shape(layer) for layer in model.layers}
    if len(shapes) != 1 or len(model.layers) < 2:
        return None
    return shapes.pop()


def _layer_shape(layer: DecoderLayer) -> SegmentShape | None:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    if not all(_is_plain(linear) for linear in linears) or attention.q_norm is not None:
        return None
    if mlp.activation is not torch.nn.functional.silu:
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
    """Bytes the plain copies of ``model``'s matrices take."""
    return sum(_bytes(layer) for layer in model.layers)


def _bytes(layer: DecoderLayer) -> int:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return sum(
        2 * part.weight.out_features * part.weight.in_features for x in linears for part in x.parts
    )


class CompiledDecoder:
    """``model`` with a faster path for a batch of one token.

    Args:
        model: The decoder; ``segment_shape(model)`` is what ``segment`` was compiled for.
        segment: Loaded and found right on this machine.
    """

    def __init__(self, model: Decoder, segment: CompiledSegment) -> None:
        self._model = model
        self._segment = segment
        self._weights = [
            _weights(one, other) for one, other in zip(model.layers, model.layers[1:], strict=False)
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
        model, segment = self._model, self._segment
        x = model.embedding[batch.token_ids]
        turn = model.rotary.at(batch.positions)
        turned, value = _enter(model.layers[0], x, turn)
        residual, cos, sin = x[0].float(), turn[0].view(-1), turn[1].view(-1)
        for layer, cache, weights in zip(model.layers, caches, self._weights, strict=False):
            attended = _attend(layer, turned, value, cache, batch)
            inputs = [attended.view(-1), residual, cos, sin, *weights]
            residual, turned, value = segment(inputs)
            turned, value = turned.unsqueeze(0), value.unsqueeze(0)
        last = model.layers[-1]
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
    return (
        _matrix(layer.attention.o_proj),
        layer.post_attention_norm.weight,
        _matrix(layer.mlp.gate_up_proj),
        _matrix(layer.mlp.down_proj),
        following.input_norm.weight,
        _matrix(following.attention.qkv_proj),
    )


def _matrix(linear: Linear) -> torch.Tensor:
    """The weight as a plain [N, K] bf16 matrix."""
    return linear.parts[0].weight.dequantize().contiguous()
