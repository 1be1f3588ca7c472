"""The decoder's shape, from config.json. No code named by a config (``auto_map``) is ever run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from ingle.checkpoint.architectures import ARCHITECTURES, Architecture, architecture_name
from ingle.checkpoint.config_files import read_json_object, read_optional_object
from ingle.checkpoint.config_values import ConfigValues
from ingle.checkpoint.rope_config import read_rope
from ingle.plugin.checkpoint import CheckpointInfo

TorchDType = Literal["float32", "float16", "bfloat16"]

_ACTIVATIONS: Final = ("silu",)
_ACTIVATION_ALIASES: Final = {"swish": "silu"}
_STORED_DTYPES: Final[Mapping[str, TorchDType]] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know about a model besides its weights.

    Attributes:
        architecture: transformers' class name, such as ``LlamaForCausalLM``.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_layers: Decoder layers.
        num_heads: Query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: Key/value heads.
        head_dim: Size of one head; even.
        rms_norm_eps: Added to the mean square in every norm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None for the plain embedding, else its parameters with ``rope_type``
            (``linear``, ``llama3``).
        max_position_embeddings: Longest sequence the model was made for.
        tie_word_embeddings: Whether the output layer is the embedding.
        attention_bias: Whether q, k and v have biases.
        attention_output_bias: Whether the attention's output has a bias.
        mlp_bias: Whether the MLP's linears have biases.
        qk_norm: Whether queries and keys are RMS-normalised per head before rotation.
        hidden_act: Activation of the gate.
        sliding_window: Tokens a windowed layer attends to, itself included; None: all layers are
            full.
        layer_types: Per layer ``full_attention`` or ``sliding_attention``.
        dtype: Dtype the weights were made in.
        eos_token_ids: Tokens that end a generation, config and generation config together.
        bos_token_id: Token a text begins with, if any.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str
    sliding_window: int | None
    layer_types: tuple[str, ...]
    dtype: TorchDType
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def load_model_config(path: Path | str, info: CheckpointInfo | None = None) -> ModelConfig:
    """The model's configuration from ``config.json`` and ``generation_config.json``.

    Args:
        path: The model folder.
        info: What the checkpoint's headers say, when it is open already: spares reading
            config.json again and tells the dtype when the config does not.

    Raises:
        CheckpointError: Naming file, key, value and what is supported.
    """
    folder = Path(path)
    where = str(folder / "config.json")
    raw = read_json_object(folder / "config.json") if info is None else info.hf_config
    generation_path = folder / "generation_config.json"
    generation = ConfigValues(str(generation_path), read_optional_object(generation_path))
    name = architecture_name(where, raw)
    return _build(name, ConfigValues(where, raw), generation, info)


def _build(
    name: str, config: ConfigValues, generation: ConfigValues, info: CheckpointInfo | None
) -> ModelConfig:
    traits = ARCHITECTURES[name]
    vocab_size = config.size("vocab_size")
    num_layers = config.size("num_hidden_layers")
    heads = _heads(config, traits)
    rope = read_rope(config, traits.rope_theta)
    window, layer_types = _windows(config, traits, num_layers)
    bias = config.flag("attention_bias", False)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        **heads,
        rms_norm_eps=config.positive("rms_norm_eps", traits.rms_norm_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_position_embeddings=config.size(
            "max_position_embeddings", traits.max_position_embeddings
        ),
        tie_word_embeddings=config.flag("tie_word_embeddings", traits.tie_word_embeddings),
        attention_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        attention_output_bias=bias if traits.output_bias is None else traits.output_bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=traits.qk_norm,
        hidden_act=_activation(config),
        sliding_window=window,
        layer_types=layer_types,
        dtype=_dtype(config, info),
        eos_token_ids=_eos(config, generation, vocab_size),
        bos_token_id=_bos(config, generation, vocab_size),
    )


def _heads(config: ConfigValues, traits: Architecture) -> dict[str, int]:
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    hidden_size = config.size("hidden_size")
    default = traits.head_dim or hidden_size // num_heads
    if not config.has("head_dim") and traits.head_dim is None and hidden_size % num_heads:
        raise config.wrong("hidden_size", hidden_size, f"a multiple of {num_heads} heads")
    head_dim = config.size("head_dim", default)
    if head_dim % 2:
        raise config.wrong("head_dim", head_dim, "even, since rotation pairs its elements")
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _activation(config: ConfigValues) -> str:
    named = config.text("hidden_act", "silu")
    activation = _ACTIVATION_ALIASES.get(named, named)
    if activation not in _ACTIVATIONS:
        raise config.wrong("hidden_act", named, f"one of {', '.join(_ACTIVATIONS)}")
    return activation


def _windows(
    config: ConfigValues, traits: Architecture, num_layers: int
) -> tuple[int | None, tuple[str, ...]]:
    """The window and each layer's kind, as transformers' config classes derive them."""
    full = ("full_attention",) * num_layers
    # A null in the file means no window; a key that is not there means the class's default.
    absent = not config.present("sliding_window")
    window = traits.sliding_window if absent else config.optional_size("sliding_window")
    on = traits.windowed == "always"
    if traits.windowed == "flag":
        on = config.flag("use_sliding_window", False)
    if not on or window is None:
        return None, full
    kinds = _layer_types(config, traits, num_layers)
    return (window, kinds) if "sliding_attention" in kinds else (None, full)


def _layer_types(config: ConfigValues, traits: Architecture, num_layers: int) -> tuple[str, ...]:
    given = config.raw("layer_types")
    if given is not None:
        known = ("full_attention", "sliding_attention")
        valid = isinstance(given, list) and len(given) == num_layers
        if not valid or any(kind not in known for kind in given):
            wanted = f"a list of {num_layers} of {' and '.join(known)}"
            raise config.wrong("layer_types", given, wanted)
        return tuple(given)
    if traits.windowed == "always":
        return ("sliding_attention",) * num_layers
    first = config.size("max_window_layers", 28, low=0)
    return tuple(
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    )


def _dtype(config: ConfigValues, info: CheckpointInfo | None) -> TorchDType:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if config.has(key):
        named = config.text(key).removeprefix("torch.")
        if named not in _STORED_DTYPES.values():
            raise config.wrong(key, named, f"one of {', '.join(_STORED_DTYPES.values())}")
        return cast(TorchDType, named)
    stored = info.tensor_dtypes.values() if info is not None else ()
    return next((_STORED_DTYPES[dtype] for dtype in stored if dtype in _STORED_DTYPES), "float32")


def _eos(config: ConfigValues, generation: ConfigValues, vocab_size: int) -> tuple[int, ...]:
    both = [
        *config.token_ids("eos_token_id", vocab_size),
        *generation.token_ids("eos_token_id", vocab_size),
    ]
    return tuple(dict.fromkeys(both))


def _bos(config: ConfigValues, generation: ConfigValues, vocab_size: int) -> int | None:
    for values in (config, generation):
        for token_id in values.token_ids("bos_token_id", vocab_size):
            return token_id
    return None
