"""The decoder's shape, from config.json. No code named by a config (``auto_map``) is ever run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from ingle.checkpoint.architectures import (
    ARCHITECTURES,
    Architecture,
    NormNames,
    architecture_name,
)
from ingle.checkpoint.config_files import read_json_object, read_optional_object
from ingle.checkpoint.config_values import ConfigValues
from ingle.checkpoint.expert_config import ExpertConfig, read_experts
from ingle.checkpoint.layer_windows import read_windows
from ingle.checkpoint.rope_config import RopeConfig, read_ropes
from ingle.checkpoint.scale_config import ScaleConfig, read_scales
from ingle.plugin.checkpoint import CheckpointInfo

TorchDType = Literal["float32", "float16", "bfloat16"]
Implementation = Literal["ingle", "transformers"]
"""Whose code computes a model: the own decoder's, or transformers' through its backend."""

ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
"""Activations of the gate that the decoder computes."""
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
        ropes: Per layer how positions turn into angles; None: the layer does not rotate.
        max_position_embeddings: Longest sequence the model was made for.
        tie_word_embeddings: Whether the output layer is the embedding.
        attention_bias: Whether q, k and v have biases.
        attention_output_bias: Whether the attention's output has a bias.
        mlp_bias: Whether the MLP's linears have biases.
        qk_norm: Whether queries and keys are RMS-normalised before rotation.
        qk_norm_whole: Whether over the whole projection at once, not per head.
        norms: Names and places of a layer's norms.
        norm_offset: Added to every norm's weight.
        norm_in_float32: Whether norms are rounded after the weight, not before it.
        hidden_act: Activation of the gate.
        sliding_window: Tokens a windowed layer attends to, itself included; None: all layers are
            full.
        layer_types: Per layer ``full_attention`` or ``sliding_attention``.
        scales: Factors and bounds along the way.
        experts: The mixture of experts; None: every layer has one MLP.
        dtype: Dtype the weights were made in.
        eos_token_ids: Tokens that end a generation, config and generation config together.
        bos_token_id: Token a text begins with, if any.
        implementation: Whose code computes it. For transformers' only sizes, attention and tokens
            are told here; the rest is its own affair.
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
    ropes: tuple[RopeConfig | None, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    qk_norm_whole: bool
    norms: NormNames
    norm_offset: float
    norm_in_float32: bool
    hidden_act: str
    sliding_window: int | None
    layer_types: tuple[str, ...]
    scales: ScaleConfig
    experts: ExpertConfig | None
    dtype: TorchDType
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    implementation: Implementation = "ingle"

    @property
    def longest_context(self) -> int:
        """Tokens of a sequence at most: rotary scaling may reach past
        ``max_position_embeddings``."""
        reached = [rope.longest for rope in self.ropes if rope is not None]
        return max([self.max_position_embeddings, *reached])


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
    name = architecture_name(where, raw)
    return _build(name, ConfigValues(where, raw), _generation(folder), info)


def read_ends(
    path: Path | str, info: CheckpointInfo, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """The tokens that end a generation, and the one a text begins with, if any.

    Raises:
        CheckpointError: When one is outside the vocabulary.
    """
    config = ConfigValues(str(Path(path) / "config.json"), info.hf_config)
    generation = _generation(Path(path))
    return _eos(config, generation, vocab_size), _bos(config, generation, vocab_size)


def read_stored_dtype(path: Path | str, info: CheckpointInfo) -> TorchDType:
    """The dtype the weights were made in.

    Raises:
        CheckpointError: When the config names one that Ingle does not know.
    """
    return _dtype(ConfigValues(str(Path(path) / "config.json"), info.hf_config), info)


def _generation(folder: Path) -> ConfigValues:
    path = folder / "generation_config.json"
    return ConfigValues(str(path), read_optional_object(path))


def _build(
    name: str, config: ConfigValues, generation: ConfigValues, info: CheckpointInfo | None
) -> ModelConfig:
    traits = ARCHITECTURES[name]
    vocab_size = config.size("vocab_size")
    num_layers = config.size("num_hidden_layers")
    heads = _heads(config, traits)
    window, layer_types = read_windows(config, traits, num_layers)
    bias = config.flag("attention_bias", False)
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads["num_heads"],
        num_kv_heads=heads["num_kv_heads"],
        head_dim=heads["head_dim"],
        rms_norm_eps=config.positive("rms_norm_eps", traits.rms_norm_eps),
        ropes=read_ropes(config, traits, heads["head_dim"], layer_types),
        max_position_embeddings=config.size(
            "max_position_embeddings", traits.max_position_embeddings
        ),
        tie_word_embeddings=config.flag("tie_word_embeddings", traits.tie_word_embeddings),
        attention_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        attention_output_bias=bias if traits.output_bias is None else traits.output_bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=traits.qk_norm,
        qk_norm_whole=traits.qk_norm_whole,
        norms=traits.norms,
        norm_offset=traits.norm_offset,
        norm_in_float32=traits.norm_in_float32,
        hidden_act=_activation(config, traits),
        sliding_window=window,
        layer_types=layer_types,
        scales=read_scales(config, traits, heads["head_dim"]),
        experts=read_experts(config, traits.experts, num_layers),
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


def _activation(config: ConfigValues, traits: Architecture) -> str:
    key = traits.activation_key
    named = config.text(key, traits.activation)
    activation = _ACTIVATION_ALIASES.get(named, named)
    if activation not in ACTIVATIONS:
        raise config.wrong(key, named, f"one of {', '.join(ACTIVATIONS)}")
    return activation


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
