"""Factors and bounds on a model's activations, from config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ingle.checkpoint.architectures import Architecture
from ingle.checkpoint.config_values import ConfigValues


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig:
    """Factors and bounds; a bound works as ``cap * tanh(x / cap)``.

    Attributes:
        embedding_multiplier: Factor on the embeddings.
        residual_multiplier: Factor on each block's output before it joins the residual.
        attention_scale: Factor on the attention's logits.
        attention_softcap: Bound of the attention's logits; None: free.
        logits_divisor: What the output logits are divided by.
        logits_softcap: Bound of the output logits; None: free.
    """

    attention_scale: float
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_softcap: float | None = None
    logits_divisor: float = 1.0
    logits_softcap: float | None = None


def read_scales(config: ConfigValues, traits: Architecture, head_dim: int) -> ScaleConfig:
    """The factors and bounds that ``config`` and its class have.

    Raises:
        CheckpointError: Naming a value that is no number above 0.
    """
    scales = ScaleConfig(attention_scale=head_dim**-0.5)
    if traits.scaled_embedding:
        scales = replace(scales, embedding_multiplier=config.size("hidden_size") ** 0.5)
    if traits.query_scalar is not None:
        scalar = config.positive("query_pre_attn_scalar", traits.query_scalar)
        scales = replace(scales, attention_scale=scalar**-0.5)
    if traits.multipliers:
        scales = ScaleConfig(
            embedding_multiplier=config.positive("embedding_multiplier", 1.0),
            residual_multiplier=config.positive("residual_multiplier", 1.0),
            attention_scale=config.positive("attention_multiplier", 1.0),
            logits_divisor=config.positive("logits_scaling", 1.0),
        )
    return replace(
        scales,
        attention_softcap=_softcap(config, traits, "attn_logit_softcapping"),
        logits_softcap=_softcap(config, traits, "final_logit_softcapping"),
    )


def _softcap(config: ConfigValues, traits: Architecture, key: str) -> float | None:
    """A null in the file means no bound; a key that is not there, the class's default."""
    if key not in traits.softcaps:
        return None
    if config.has(key):
        return config.positive(key)
    return None if config.present(key) else traits.softcaps[key]
