"""Which models' decode steps are compiled on a CPU, from their configuration. No torch here."""

from __future__ import annotations

from typing import Final

from ingle.checkpoint.model_config import ModelConfig

MAX_EXTRA_BYTES: Final = 2 * 1024**3
"""A compiled segment reads plain matrices, beside the packed ones that prompts use. Above this
size the copies cost more than they bring: such models are bound by memory bandwidth anyway."""


def may_compile(model: ModelConfig) -> bool:
    """Whether segments know this kind of model, as ``segment_shapes`` finds out once it is loaded;
    the weights have to be of a kind they know too."""
    if model.implementation != "ingle" or model.num_layers < 2 or model.experts is not None:
        return False
    scales, norms = model.scales, model.norms
    rope = model.ropes[0]
    if rope is None or any(other != rope for other in model.ropes):
        return False
    is_plain = norms.attention_output is None and norms.mlp_output is None
    has_norms = norms.attention_input is not None and norms.mlp_input is not None
    is_scaled = scales.embedding_multiplier != 1 or scales.residual_multiplier != 1
    return (
        is_plain
        and has_norms
        and not is_scaled
        and scales.attention_softcap is None
        and not model.norm_in_float32
        and not model.qk_norm_whole
        and model.hidden_act == "silu"
        and rope.rotary_dim == model.head_dim
    )
