"""Builds the decoder from a checkpoint: names, shapes, and which parts exist."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingle.checkpoint.model_config import ModelConfig
from ingle.checkpoint.rope_config import RopeConfig
from ingle.errors import CheckpointError
from ingle.model.decoder import (
    AttentionBackend,
    Decoder,
    DecoderLayer,
    Edge,
    EdgedLayer,
    HeadShape,
    Layer,
    SelfAttention,
)
from ingle.model.experts import ExpertMLP
from ingle.model.feed_forward import MLP
from ingle.model.feed_forward_build import build_experts, build_mlp
from ingle.model.layers import FullRMSNorm, ProjectionNorm, RMSNorm
from ingle.model.linear import Linear
from ingle.model.rope_frequencies import rope_frequencies
from ingle.model.rotary import RotaryTable
from ingle.model.streamed_layers import LayerStream, Offload
from ingle.model.weights import WeightSource


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    backend: Callable[[int | None], AttentionBackend],
    max_model_len: int,
    offload: Offload | None = None,
) -> Decoder:
    """Loads every weight ``config`` calls for.

    Args:
        config: The model's shape.
        source: Where weights come from.
        backend: Makes attention for this device and a layer's sliding window (None: all).
        max_model_len: Positions to prepare rotary tables for.
        offload: The last layers whose weights stay in host memory.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
        CapacityError: When a kernel's weights cannot be streamed.
    """
    shape = (config.vocab_size, config.hidden_size)
    embedding = source.embedding("model.embed_tokens.weight", shape)
    scales = config.scales
    layers: list[Layer] = []
    stream = None if offload is None else LayerStream(offload.boundary)
    first_streamed = config.num_layers - (0 if offload is None else offload.num_layers)
    for index in range(config.num_layers):
        windowed = config.layer_types[index] == "sliding_attention"
        attention = backend(config.sliding_window if windowed else None)
        layer = build_layer(config, source, attention, index)
        if stream is not None and index >= first_streamed:
            layers.append(stream.add(layer))
        else:
            layers.append(layer)
    if stream is not None:
        stream.open()
    return Decoder(
        embedding=embedding,
        layers=tuple(layers),
        norm=build_norm(config, source, "model.norm", config.hidden_size),
        lm_head=_head(config, source),
        rotaries=build_rotaries(config, source, max_model_len),
        # In the activation dtype, as the models that have a root here were trained.
        embedding_multiplier=float(torch.tensor(scales.embedding_multiplier, dtype=source.dtype)),
        logits_divisor=scales.logits_divisor,
        logits_softcap=scales.logits_softcap,
        pads_prompts=source.dtype is torch.bfloat16
        and source.device.type == "cpu"
        and config.experts is None,
    )


def _distinct_ropes(config: ModelConfig) -> list[RopeConfig | None]:
    """Every rope that some layer has, once."""
    distinct: list[RopeConfig | None] = []
    for rope in config.ropes:
        if rope not in distinct:
            distinct.append(rope)
    return distinct


def build_rotaries(
    config: ModelConfig, source: WeightSource, max_model_len: int
) -> tuple[RotaryTable | None, ...]:
    """The rotary tables that layers share, each once, for ``max_model_len`` positions."""
    device = torch.device(source.device.torch_device)
    tables: list[RotaryTable | None] = []
    for rope in _distinct_ropes(config):
        if rope is None:
            tables.append(None)
        else:
            frequencies = rope_frequencies(rope, max_model_len)
            tables.append(RotaryTable(frequencies, max_model_len, source.dtype, device))
    return tuple(tables)


def _head(config: ModelConfig, source: WeightSource) -> Linear:
    """The output head: its own tensor where the file has one, else the embedding's.

    Tensors win over ``tie_word_embeddings``: EXL2 files quantise a tied head into one of its own.
    """
    if source.has_linear("lm_head"):
        return source.linear(["lm_head"], [config.vocab_size], config.hidden_size)
    if not config.tie_word_embeddings:
        raise CheckpointError(
            "the checkpoint has no lm_head, and config.json does not say that it shares the "
            "embedding (tie_word_embeddings). A shard may be missing."
        )
    return source.tied_head("model.embed_tokens", config.vocab_size, config.hidden_size)


def build_norm(config: ModelConfig, source: WeightSource, name: str, size: int) -> RMSNorm:
    """The norm ``name`` over ``size`` elements.

    Raises:
        CheckpointError: When its tensor is missing or has another shape.
    """
    return _as_norm(config, source.tensor(f"{name}.weight", (size,)))


def _as_norm(config: ModelConfig, weight: torch.Tensor) -> RMSNorm:
    if config.norm_in_float32:
        return FullRMSNorm(weight, config.rms_norm_eps, config.norm_offset)
    return RMSNorm(weight, config.rms_norm_eps)


def _qk_norm(
    config: ModelConfig, source: WeightSource, name: str, num_heads: int
) -> RMSNorm | ProjectionNorm | None:
    if not config.qk_norm:
        return None
    if config.qk_norm_whole:
        return ProjectionNorm(build_norm(config, source, name, num_heads * config.head_dim))
    return _as_norm(config, source.head_norm(f"{name}.weight", num_heads, config.head_dim))


def build_layer(
    config: ModelConfig, source: WeightSource, backend: AttentionBackend, index: int
) -> DecoderLayer | EdgedLayer:
    """One layer.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
    """
    prefix = f"model.layers.{index}"
    rotary = _distinct_ropes(config).index(config.ropes[index])
    attention = _attention(config, source, backend, f"{prefix}.self_attn")
    mlp = _feed_forward(config, source, index)
    around_attention, around_mlp = _edges(config, source, prefix)
    if _is_plain(around_attention) and _is_plain(around_mlp):
        assert around_attention.input_norm is not None
        assert around_mlp.input_norm is not None
        return DecoderLayer(
            input_norm=around_attention.input_norm,
            attention=attention,
            post_attention_norm=around_mlp.input_norm,
            mlp=mlp,
            rotary=rotary,
        )
    return EdgedLayer(
        attention=attention,
        around_attention=around_attention,
        mlp=mlp,
        around_mlp=around_mlp,
        rotary=rotary,
    )


def _edges(config: ModelConfig, source: WeightSource, prefix: str) -> tuple[Edge, Edge]:
    """What lies around the attention and around the feed-forward block."""
    names = config.norms

    def edge(before: str | None, after: str | None) -> Edge:
        size = config.hidden_size
        return Edge(
            input_norm=build_norm(config, source, f"{prefix}.{before}", size) if before else None,
            output_norm=build_norm(config, source, f"{prefix}.{after}", size) if after else None,
            multiplier=config.scales.residual_multiplier,
        )

    return (
        edge(names.attention_input, names.attention_output),
        edge(names.mlp_input, names.mlp_output),
    )


def _is_plain(edge: Edge) -> bool:
    return edge.input_norm is not None and edge.output_norm is None and edge.multiplier == 1


def _attention(
    config: ModelConfig, source: WeightSource, backend: AttentionBackend, prefix: str
) -> SelfAttention:
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return SelfAttention(
        shape=HeadShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
        qkv_proj=source.joined_linear(
            f"{prefix}.qkv_proj",
            [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
            [q_size, kv_size, kv_size],
            config.hidden_size,
        ),
        o_proj=source.linear([f"{prefix}.o_proj"], [config.hidden_size], q_size),
        backend=backend,
        q_norm=_qk_norm(config, source, f"{prefix}.q_norm", config.num_heads),
        k_norm=_qk_norm(config, source, f"{prefix}.k_norm", config.num_kv_heads),
    )


def _feed_forward(config: ModelConfig, source: WeightSource, index: int) -> MLP | ExpertMLP:
    prefix = f"model.layers.{index}"
    if config.experts is not None and config.experts.layers[index]:
        return build_experts(config, source, prefix)
    return build_mlp(config, source, f"{prefix}.mlp", config.intermediate_size)
