"""Builds the decoder from a checkpoint: names, shapes, and which parts exist."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingle.checkpoint.model_config import ModelConfig
from ingle.errors import CheckpointError
from ingle.model.decoder import (
    MLP,
    AttentionBackend,
    Decoder,
    DecoderLayer,
    HeadShape,
    SelfAttention,
)
from ingle.model.layers import RMSNorm, activation
from ingle.model.linear import Linear
from ingle.model.rotary import RotaryTable, inverse_frequencies
from ingle.model.weights import WeightSource


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    backend: Callable[[int | None], AttentionBackend],
    max_model_len: int,
) -> Decoder:
    """Loads every weight ``config`` calls for.

    Args:
        config: The model's shape.
        source: Where weights come from.
        backend: Makes attention for this device and a layer's sliding window (None: all).
        max_model_len: Positions to prepare rotary tables for.

    Raises:
        CheckpointError: When a tensor is missing or has another shape.
    """
    shape = (config.vocab_size, config.hidden_size)
    embedding = source.embedding("model.embed_tokens.weight", shape)
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        windowed = config.layer_types[index] == "sliding_attention"
        attention = backend(config.sliding_window if windowed else None)
        layers.append(_layer(config, source, attention, prefix))
    norm = _norm(config, source, "model.norm", config.hidden_size)
    head = _head(config, source)
    inverse = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    device = torch.device(source.device.torch_device)
    rotary = RotaryTable(inverse, max_model_len, source.dtype, device)
    return Decoder(
        embedding=embedding, layers=tuple(layers), norm=norm, lm_head=head, rotary=rotary
    )


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


def _norm(config: ModelConfig, source: WeightSource, name: str, size: int) -> RMSNorm:
    return RMSNorm(source.tensor(f"{name}.weight", (size,)), config.rms_norm_eps)


def _head_norm(
    config: ModelConfig, source: WeightSource, name: str, num_heads: int
) -> RMSNorm | None:
    if not source.has_tensor(f"{name}.weight"):
        return None
    weight = source.head_norm(f"{name}.weight", num_heads, config.head_dim)
    return RMSNorm(weight, config.rms_norm_eps)


def _layer(
    config: ModelConfig, source: WeightSource, backend: AttentionBackend, prefix: str
) -> DecoderLayer:
    return DecoderLayer(
        input_norm=_norm(config, source, f"{prefix}.input_layernorm", config.hidden_size),
        attention=_attention(config, source, backend, f"{prefix}.self_attn"),
        post_attention_norm=_norm(
            config, source, f"{prefix}.post_attention_layernorm", config.hidden_size
        ),
        mlp=_mlp(config, source, f"{prefix}.mlp"),
    )


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
        qkv_proj=source.linear(
            [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
            [q_size, kv_size, kv_size],
            config.hidden_size,
        ),
        o_proj=source.linear([f"{prefix}.o_proj"], [config.hidden_size], q_size),
        backend=backend,
        q_norm=_head_norm(config, source, f"{prefix}.q_norm", config.num_heads),
        k_norm=_head_norm(config, source, f"{prefix}.k_norm", config.num_kv_heads),
    )


def _mlp(config: ModelConfig, source: WeightSource, prefix: str) -> MLP:
    inner = config.intermediate_size
    return MLP(
        gate_up_proj=source.linear(
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [inner, inner], config.hidden_size
        ),
        down_proj=source.linear([f"{prefix}.down_proj"], [config.hidden_size], inner),
        activation=activation(config.hidden_act),
    )
