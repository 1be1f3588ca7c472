"""What the decoder's architectures differ in, beyond what config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ingle.errors import CheckpointError

WindowPattern = Literal["all", "upper", "lower_alternate", "periodic", "unturned"]
"""Which layers have a sliding window when ``layer_types`` does not say: ``all``; ``upper``, from
``max_window_layers`` on; ``lower_alternate``, every other one below it; ``periodic``, all but
every n-th; ``unturned``, those without rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Tensor names of a layer's norms; None: that place has none.

    Attributes:
        attention_input, mlp_input: Before the block.
        attention_output, mlp_output: After the block, before its output joins the residual.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """transformers' defaults for a class with a mixture of experts.

    Attributes:
        num_experts_key: Where config.json has the number of experts.
        num_experts, num_chosen: Experts of a layer, and how many a token visits.
        size_key, size: Where config.json has the width of an expert, and its default.
        normalise: Whether the visited experts' weights sum to one; None: ``norm_topk_prob`` says.
        shared_size: Width of the expert that every token visits; None: there is none.
    """

    num_experts_key: str = "num_experts"
    num_experts: int
    num_chosen: int
    size_key: str = "moe_intermediate_size"
    size: int
    normalise: bool | None = None
    shared_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Facts of one model class that transformers has in code and not in config.json.

    Attributes:
        qkv_bias: Whether q, k and v have biases; None: ``attention_bias`` says.
        output_bias: Whether the attention's output has a bias; None: ``attention_bias`` says.
        qk_norm: Whether queries and keys are normalised.
        qk_norm_whole: Whether over the whole projection at once, not per head.
        norms: Names and places of a layer's norms.
        norm_offset: Added to every norm's weight.
        norm_in_float32: Whether norms are rounded after the weight, not before it.
        rms_norm_eps, rope_theta, max_position_embeddings, tie_word_embeddings, head_dim:
            transformers' defaults, for configs that leave them out. ``head_dim`` None:
            hidden size over heads.
        sliding_rope_theta: Base of the windowed layers' own rotation; None: they share one.
        original_positions: ``original_max_position_embeddings`` when config.json leaves it out.
        longrope_names: Older names of the rope type ``longrope``.
        no_rope_interval: Every n-th layer has no rotation, when ``no_rope_layers`` is not given.
        activation_key, activation: Where the activation's name is, and its default.
        sliding_window: Window when config.json leaves it out.
        windowed: When the window counts: ``always``, ``flag`` (``use_sliding_window``), ``never``.
        window_pattern, window_period: Which layers have it.
        scaled_embedding: Whether embeddings are multiplied by the root of the hidden size.
        query_scalar: ``query_pre_attn_scalar`` when config.json leaves it out; None: the class
            scales by the head size.
        multipliers: Whether Granite's scale factors count.
        softcaps: The bounds of logits that the class computes, by their key in config.json, and
            their defaults.
        experts: Defaults of the mixture of experts; None: the class has none.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norms: NormNames = NormNames()
    norm_offset: float = 0.0
    norm_in_float32: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    sliding_rope_theta: float | None = None
    original_positions: int | None = None
    longrope_names: tuple[str, ...] = ("su",)
    no_rope_interval: int | None = None
    activation_key: str = "hidden_act"
    activation: str = "silu"
    sliding_window: int | None = None
    windowed: Literal["always", "flag", "never"] = "never"
    window_pattern: WindowPattern = "all"
    window_period: int = 1
    scaled_embedding: bool = False
    query_scalar: float | None = None
    multipliers: bool = False
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    experts: ExpertTraits | None = None


_SANDWICH: Final = NormNames(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_AFTER: Final = NormNames(
    attention_input=None,
    attention_output="post_attention_layernorm",
    mlp_input=None,
    mlp_output="post_feedforward_layernorm",
)

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
        window_pattern="upper",
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        max_position_embeddings=32768,
        head_dim=128,
        sliding_window=4096,
        windowed="flag",
        window_pattern="upper",
    ),
    "SmolLM3ForCausalLM": Architecture(
        rope_theta=2_000_000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        no_rope_interval=4,
        windowed="flag",
        window_pattern="unturned",
    ),
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False,
        output_bias=False,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        original_positions=4096,
        longrope_names=("su", "yarn"),
        windowed="always",
    ),
    "Gemma2ForCausalLM": Architecture(
        norms=_SANDWICH,
        norm_offset=1.0,
        norm_in_float32=True,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        sliding_window=4096,
        windowed="always",
        window_pattern="periodic",
        window_period=2,
        scaled_embedding=True,
        query_scalar=256.0,
        softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Architecture(
        qk_norm=True,
        norms=_SANDWICH,
        norm_offset=1.0,
        norm_in_float32=True,
        rope_theta=1_000_000.0,
        sliding_rope_theta=10_000.0,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        sliding_window=4096,
        windowed="always",
        window_pattern="periodic",
        window_period=6,
        scaled_embedding=True,
        query_scalar=256.0,
        softcaps={"final_logit_softcapping": None},
    ),
    "GraniteForCausalLM": Architecture(multipliers=True),
    "Olmo2ForCausalLM": Architecture(
        qk_norm=True,
        qk_norm_whole=True,
        norms=_AFTER,
        norm_in_float32=True,
        rms_norm_eps=1e-5,
    ),
    "MixtralForCausalLM": Architecture(
        qkv_bias=False,
        output_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        max_position_embeddings=4096 * 32,
        windowed="always",
        experts=ExpertTraits(
            num_experts_key="num_local_experts",
            num_experts=8,
            num_chosen=2,
            size_key="intermediate_size",
            size=14336,
            normalise=True,
        ),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        qkv_bias=True,
        output_bias=False,
        max_position_embeddings=32768,
        sliding_window=4096,
        windowed="flag",
        window_pattern="lower_alternate",
        experts=ExpertTraits(num_experts=60, num_chosen=4, size=1408, shared_size=5632),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm=True,
        max_position_embeddings=32768,
        sliding_window=4096,
        windowed="flag",
        experts=ExpertTraits(num_experts=128, num_chosen=8, size=768),
    ),
}
"""The model classes the decoder computes, by the name config.json has under ``architectures``."""

_BY_MODEL_TYPE: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the decoder computes the config's architecture."""
    return _name(config) in ARCHITECTURES


def architecture_name(where: str, config: Mapping[str, Any]) -> str:
    """The config's architecture; from ``model_type`` when ``architectures`` is not given.

    Raises:
        CheckpointError: Naming the architecture, and those that are supported.
    """
    name = _name(config)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        shown = name if isinstance(name, str) else f"model_type {config.get('model_type')!r}"
        raise CheckpointError(
            f"{where}: the architecture {shown[:80]} is not supported. "
            f"Supported are {', '.join(ARCHITECTURES)}."
        )
    return name


def _name(config: Mapping[str, Any]) -> Any:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return _BY_MODEL_TYPE.get(str(config.get("model_type"))) if name is None else name
