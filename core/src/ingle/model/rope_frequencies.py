"""The frequencies of every rope type, by the names Hugging Face configs use.

Sources: linear, "Extending Context Window" (Chen et al. 2023); dynamic, the NTK-aware base of
u/bloc97 and u/emozilla; yarn, "YaRN" (Peng et al. 2023); longrope, "LongRoPE" (Ding et al. 2024);
llama3, Llama 3.1's reference code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ingle.checkpoint.rope_config import RopeConfig
from ingle.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """What a rotary table is made of.

    Attributes:
        inverse: Inverse frequencies, float32 [R / 2].
        gain: Factor on cosines and sines; it sharpens attention over stretched positions.
    """

    inverse: torch.Tensor
    gain: float = 1.0


def rope_frequencies(rope: RopeConfig, max_model_len: int) -> RopeFrequencies:
    """The frequencies of ``rope`` for sequences of up to ``max_model_len`` tokens.

    ``dynamic`` and ``longrope`` depend on the length. It is the engine's, not each sequence's:
    keys in the cache are turned already, and are shared between sequences of every length.

    Raises:
        CheckpointError: When the rope type is unknown.
    """
    scaling = rope.scaling or {}
    kind = str(scaling.get("rope_type", "default"))
    if kind not in _KINDS:
        raise CheckpointError(
            f"config.json asks for rope_type {kind!r}, which Ingle does not know; it knows "
            f"{', '.join(_KINDS)}."
        )
    return _KINDS[kind](rope, scaling, max_model_len)


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (theta**exponents)


def _default(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    return RopeFrequencies(inverse=_plain(rope.theta, rope.rotary_dim))


def _linear(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    return RopeFrequencies(inverse=_plain(rope.theta, rope.rotary_dim) / scaling["factor"])


def _dynamic(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    """A larger base for sequences beyond the model's own length; the plain one up to it."""
    dim, factor = rope.rotary_dim, scaling["factor"]
    stretch = factor * max(length, rope.max_positions) / rope.max_positions - (factor - 1)
    return RopeFrequencies(inverse=_plain(rope.theta * stretch ** (dim / (dim - 2)), dim))


def _proportional(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    """The first share of pairs turns as in the plain embedding; the rest have frequency 0."""
    inverse = _plain(rope.theta, rope.rotary_dim)
    turning = int(scaling.get("partial_rotary_factor", 1.0) * rope.rotary_dim // 2)
    inverse[turning:] = 0
    return RopeFrequencies(inverse=inverse / scaling.get("factor", 1.0))


def _llama3(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    base = _plain(rope.theta, rope.rotary_dim)
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / base
    blend = (trained / waves - low) / (high - low)
    blended = (1 - blend) * base / factor + blend * base
    long = torch.where(waves > trained / low, base / factor, base)
    between = (waves <= trained / low) & (waves >= trained / high)
    return RopeFrequencies(inverse=torch.where(between, blended, long))


def _longrope(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    """Each pair has a factor of its own, found by search: one set up to the trained length, one
    beyond it."""
    trained = scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if length > trained else "short_factor"]
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    factor = scaling.get("factor", rope.max_positions / trained)
    gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return RopeFrequencies(inverse=inverse, gain=scaling.get("attention_factor", gain))


def _yarn(rope: RopeConfig, scaling: Mapping[str, Any], length: int) -> RopeFrequencies:
    """Pairs that turn often within the trained length keep their frequency, those that turn
    seldom are stretched by ``factor``; a ramp lies between."""
    trained = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor", rope.max_positions / trained)
    low = _yarn_pair(rope, scaling.get("beta_fast", 32), trained)
    high = _yarn_pair(rope, scaling.get("beta_slow", 1), trained)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    span = high - low if high != low else 0.001
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    stretched = torch.clamp((pairs - low) / span, 0, 1)
    base = _plain(rope.theta, rope.rotary_dim)
    inverse = base / factor * stretched + base * (1 - stretched)
    return RopeFrequencies(inverse=inverse, gain=_yarn_gain(factor, scaling))


def _yarn_pair(rope: RopeConfig, rotations: float, trained: int) -> float:
    """The pair, as a fraction, that turns ``rotations`` times within the trained length."""
    turns = math.log(trained / (rotations * 2 * math.pi))
    return rope.rotary_dim * turns / (2 * math.log(rope.theta))


def _yarn_gain(factor: float, scaling: Mapping[str, Any]) -> float:
    def at(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return at(scaling["mscale"]) / at(scaling["mscale_all_dim"])
    return at(1.0)


_Kind = Callable[[RopeConfig, Mapping[str, Any], int], RopeFrequencies]
_KINDS: Mapping[str, _Kind] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
