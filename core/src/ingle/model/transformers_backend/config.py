"""The configuration of a model that transformers' code computes, as the engine wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingle.checkpoint.architectures import NormNames
from ingle.checkpoint.model_config import ModelConfig, read_ends, read_stored_dtype
from ingle.checkpoint.scale_config import ScaleConfig
from ingle.errors import CheckpointError
from ingle.model.transformers_backend.probe import LayerAttention, probe
from ingle.model.transformers_backend.skeleton import build_skeleton
from ingle.plugin.checkpoint import CheckpointInfo


def load_transformers_config(path: Path | str, info: CheckpointInfo) -> ModelConfig:
    """The configuration of the model at ``path``, from transformers' code and ``info``.

    Raises:
        CheckpointError: When transformers' model cannot be served, and why.
    """
    where = str(Path(path) / "config.json")
    model = build_skeleton(where, info.hf_config)
    config = model.config.get_text_config()
    layers = probe(model)
    first = _only_kind(type(model).__name__, layers)
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise CheckpointError(f"{where}: layers have windows of several sizes {sorted(windows)}.")
    eos, bos = read_ends(path, info, config.vocab_size)
    return ModelConfig(
        implementation="transformers",
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_inner(config),
        num_layers=len(layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        rms_norm_eps=1e-6,
        ropes=(),
        max_position_embeddings=_positions(where, config),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        qk_norm_whole=False,
        norms=NormNames(),
        norm_offset=0.0,
        norm_in_float32=False,
        hidden_act="silu",
        sliding_window=next(iter(windows), None),
        layer_types=tuple(
            "full_attention" if layer.window is None else "sliding_attention" for layer in layers
        ),
        scales=ScaleConfig(attention_scale=first.scale, attention_softcap=first.softcap),
        experts=None,
        dtype=read_stored_dtype(path, info),
        eos_token_ids=eos,
        bos_token_id=bos,
    )


def _only_kind(name: str, layers: tuple[LayerAttention, ...]) -> LayerAttention:
    """The first layer, when all others attend in the same way but for their windows."""

    def shape(layer: LayerAttention) -> tuple[float | None, ...]:
        kv = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        return (*kv, layer.scale, layer.softcap)

    if len({shape(layer) for layer in layers}) != 1:
        raise CheckpointError(
            f"The architecture {name} is not supported: its layers differ in heads or scale."
        )
    return layers[0]


def _inner(config: Any) -> int:
    """Width of the feed-forward block, which the size of activations is estimated from."""
    for key in ("intermediate_size", "ffn_dim", "n_inner"):
        size = getattr(config, key, None)
        if isinstance(size, int):
            return size
    return 4 * int(config.hidden_size)


def _positions(where: str, config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        size = getattr(config, key, None)
        if isinstance(size, int) and size > 0:
            return size
    raise CheckpointError(f"{where}: max_position_embeddings is missing.")
