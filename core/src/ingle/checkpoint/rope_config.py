"""The rotary embedding's part of config.json, in whichever of its spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingle.checkpoint.config_values import ConfigValues

_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
SUPPORTED_ROPE_TYPES: Final = tuple(_REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles.

    Attributes:
        theta: Base of the frequencies.
        scaling: None for the plain embedding; otherwise its parameters with ``rope_type``.
    """

    theta: float
    scaling: Mapping[str, Any] | None


def read_rope(config: ConfigValues, default_theta: float) -> RopeConfig:
    """Theta and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta`` and
    ``rope_scaling`` (before); in either, ``type`` is an old name for ``rope_type``.

    Raises:
        CheckpointError: Naming an unsupported ``rope_type`` or a missing or wrong parameter.
    """
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    raw = config.raw(key) or {}
    if not isinstance(raw, dict):
        raise config.wrong(key, raw, "a JSON object")
    values = ConfigValues(f"{config.where}: {key}", raw)
    theta = values.positive("rope_theta", config.positive("rope_theta", default_theta))
    rope_type = values.text("rope_type", values.text("type", "default"))
    if rope_type not in _REQUIRED:
        raise values.wrong("rope_type", rope_type, f"one of {', '.join(SUPPORTED_ROPE_TYPES)}")
    for source in (values, config):
        if source.positive("partial_rotary_factor", 1.0) != 1.0:
            raise source.wrong("partial_rotary_factor", source.raw("partial_rotary_factor"), "1")
    if rope_type == "default":
        return RopeConfig(theta=theta, scaling=None)
    return RopeConfig(theta=theta, scaling=_scaling(values, rope_type))


def _scaling(values: ConfigValues, rope_type: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in _REQUIRED[rope_type]:
        is_length = key == "original_max_position_embeddings"
        scaling[key] = values.size(key) if is_length else values.positive(key)
    if rope_type == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise values.wrong("low_freq_factor", scaling["low_freq_factor"], "below high_freq_factor")
    return scaling
