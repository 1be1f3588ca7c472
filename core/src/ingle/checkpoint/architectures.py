"""What the decoder's architectures differ in, beyond what config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingle.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Facts of one model class that transformers has in code and not in config.json.

    Attributes:
        qkv_bias: Whether q, k and v have biases; None: ``attention_bias`` says.
        output_bias: Whether the attention's output has a bias; None: ``attention_bias`` says.
        qk_norm: Whether queries and keys are normalised per head.
        rms_norm_eps, rope_theta, max_position_embeddings, tie_word_embeddings, head_dim:
            transformers' defaults, for configs that leave them out. ``head_dim`` None:
            hidden size over heads.
        sliding_window: Window when config.json leaves it out.
        windowed: When the window counts: ``always``, ``flag`` (``use_sliding_window``), ``never``.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    sliding_window: int | None = None
    windowed: str = "never"


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(
        qkv_bias=False,
        output_bias=False,
        max_position_embeddings=4096 * 32,
        sliding_window=4096,
        windowed="always",
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True,
        output_bias=False,
        max_position_embeddings=32768,
        sliding_window=4096,
        windowed="flag",
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        max_position_embeddings=32768,
        head_dim=128,
        sliding_window=4096,
        windowed="flag",
    ),
}
"""The model classes the decoder computes, by the name config.json has under ``architectures``."""

_BY_MODEL_TYPE: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def architecture_name(where: str, config: Mapping[str, Any]) -> str:
    """The config's architecture; from ``model_type`` when ``architectures`` is not given.

    Raises:
        CheckpointError: Naming the architecture, and those that are supported.
    """
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name is None:
        name = _BY_MODEL_TYPE.get(str(config.get("model_type")))
    if not isinstance(name, str) or name not in ARCHITECTURES:
        shown = name if isinstance(name, str) else f"model_type {config.get('model_type')!r}"
        raise CheckpointError(
            f"{where}: the architecture {shown[:80]} is not supported. "
            f"Supported are {', '.join(ARCHITECTURES)}."
        )
    return name
