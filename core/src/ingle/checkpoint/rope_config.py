"""The rotary embedding's part of config.json, in whichever of its spellings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingle.checkpoint.architectures import Architecture
from ingle.checkpoint.config_values import ConfigValues

_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}
_TRAINED: Final = ("yarn", "longrope", "llama3")
"""Types that need to know the length the model was first trained for."""
_LISTS: Final = ("short_factor", "long_factor")
SUPPORTED_ROPE_TYPES: Final = tuple(_REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles.

    Attributes:
        theta: Base of the frequencies.
        rotary_dim: Leading elements of a head that turn; even.
        max_positions: ``max_position_embeddings``, which some types measure against.
        scaling: None for the plain embedding; otherwise its parameters with ``rope_type``.
    """

    theta: float
    rotary_dim: int
    max_positions: int
    scaling: Mapping[str, Any] | None

    @property
    def longest(self) -> int:
        """Positions the scaling reaches, at least ``max_positions``."""
        scaling = self.scaling or {}
        start = 0
        if scaling.get("rope_type") in ("linear", "dynamic"):
            start = self.max_positions
        elif scaling.get("rope_type") == "yarn":
            start = scaling["original_max_position_embeddings"]
        return max(self.max_positions, int(start * scaling.get("factor", 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What every rope of one config shares."""

    config: ConfigValues
    traits: Architecture
    head_dim: int
    max_positions: int


def read_ropes(
    config: ConfigValues, traits: Architecture, head_dim: int, layer_types: tuple[str, ...]
) -> tuple[RopeConfig | None, ...]:
    """Each layer's rope, None where a layer does not turn its queries and keys.

    Parameters come from ``rope_parameters`` (transformers 5; one object, or one per layer type)
    or from ``rope_theta`` and ``rope_scaling`` (before); in any, ``type`` is an old name for
    ``rope_type``.

    Raises:
        CheckpointError: Naming an unsupported ``rope_type`` or a missing or wrong parameter.
    """
    reading = _Reading(
        config=config,
        traits=traits,
        head_dim=head_dim,
        max_positions=config.size("max_position_embeddings", traits.max_position_embeddings),
    )
    kinds = {kind: _of_kind(reading, kind) for kind in dict.fromkeys(layer_types)}
    turned = turned_layers(config, traits, len(layer_types))
    return tuple(
        kinds[kind] if turns else None for kind, turns in zip(layer_types, turned, strict=True)
    )


def _of_kind(reading: _Reading, kind: str) -> RopeConfig:
    """The rope of layers of type ``kind``."""
    config, traits = reading.config, reading.traits
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    raw = config.raw(key) or {}
    if not isinstance(raw, dict):
        raise config.wrong(key, raw, "a JSON object")
    theta = config.positive("rope_theta", traits.rope_theta)
    nested = any(name in raw for name in ("full_attention", "sliding_attention"))
    if traits.sliding_rope_theta is not None and kind == "sliding_attention":
        theta = config.positive("rope_local_base_freq", traits.sliding_rope_theta)
        raw = raw if nested else {}
    if nested:
        key, raw = f"{key}.{kind}", raw.get(kind) or {}
        if not isinstance(raw, dict):
            raise config.wrong(key, raw, "a JSON object")
    return _rope(reading, ConfigValues(f"{config.where}: {key}", raw), theta)


def turned_layers(config: ConfigValues, traits: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate: ``no_rope_layers`` has a 1 for each that does."""
    if traits.no_rope_interval is None:
        return (True,) * num_layers
    given = config.raw("no_rope_layers")
    if given is not None:
        valid = isinstance(given, list) and len(given) >= num_layers
        if not valid or any(type(flag) is not int or flag not in (0, 1) for flag in given):
            raise config.wrong("no_rope_layers", given, f"a list of {num_layers} of 0 and 1")
        return tuple(flag == 1 for flag in given[:num_layers])
    interval = config.size("no_rope_layer_interval", traits.no_rope_interval)
    return tuple(bool((layer + 1) % interval) for layer in range(num_layers))


def _rope(reading: _Reading, values: ConfigValues, theta: float) -> RopeConfig:
    rope_type = values.text("rope_type", values.text("type", "default"))
    if rope_type in reading.traits.longrope_names:
        rope_type = "longrope"
    if rope_type not in _REQUIRED:
        raise values.wrong("rope_type", rope_type, f"one of {', '.join(SUPPORTED_ROPE_TYPES)}")
    rotary_dim = reading.head_dim
    if rope_type != "proportional":
        rotary_dim = _rotary_dim(reading, values)
    scaling = None
    if rope_type != "default":
        scaling = _scaling(reading, values, rope_type, rotary_dim)
    return RopeConfig(
        theta=values.positive("rope_theta", theta),
        rotary_dim=rotary_dim,
        max_positions=reading.max_positions,
        scaling=scaling,
    )


def _rotary_dim(reading: _Reading, values: ConfigValues) -> int:
    source = values if values.has("partial_rotary_factor") else reading.config
    factor = source.positive("partial_rotary_factor", 1.0)
    rotary_dim = int(reading.head_dim * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        wanted = f"a share of the {reading.head_dim} elements of a head that is even and not zero"
        raise source.wrong("partial_rotary_factor", factor, wanted)
    return rotary_dim


def _scaling(
    reading: _Reading, values: ConfigValues, rope_type: str, rotary_dim: int
) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in _REQUIRED[rope_type]:
        is_list = key in _LISTS
        scaling[key] = _factors(values, key, rotary_dim) if is_list else values.positive(key)
    for key in _OPTIONAL.get(rope_type, ()):
        if values.has(key):
            scaling[key] = values.positive(key)
    if rope_type in _TRAINED:
        scaling["original_max_position_embeddings"] = _trained(reading, values)
    if rope_type == "yarn" and values.has("truncate"):
        scaling["truncate"] = values.flag("truncate", True)
    if rope_type == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise values.wrong("low_freq_factor", scaling["low_freq_factor"], "below high_freq_factor")
    return scaling


def _trained(reading: _Reading, values: ConfigValues) -> int:
    """``original_max_position_embeddings``: beside the rope's parameters it counts more than in
    them, since Phi-3's files have it there."""
    key = "original_max_position_embeddings"
    if reading.config.has(key):
        return reading.config.size(key)
    return values.size(key, reading.traits.original_positions or reading.max_positions)


def _factors(values: ConfigValues, key: str, rotary_dim: int) -> tuple[float, ...]:
    given = values.raw(key)
    count = rotary_dim // 2
    numbers = isinstance(given, list) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and one > 0 for one in given
    )
    if not numbers or len(given) != count:
        raise values.wrong(key, given, f"a list of {count} numbers above 0")
    return tuple(float(one) for one in given)
