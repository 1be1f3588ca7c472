"""Rotary position embedding: frequencies, tables, and the rotation itself.

Shape letters: T tokens, H heads, D head size, P positions.
Source: "RoFormer" (Su et al. 2021) in the half-split form of Llama; ``llama3`` scaling as in
Llama 3.1's reference, with the names Hugging Face configs use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ingle.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The kind of scaling a config asks for; ``default`` when there is none."""
    if not scaling:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None
) -> torch.Tensor:
    """Inverse frequencies, float32 [D / 2].

    Raises:
        CheckpointError: When the rope type is not one of ``ROPE_TYPES``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (theta**exponents)
    kind = rope_type(scaling)
    if kind == "default":
        return base
    if kind == "linear" and scaling:
        return base / float(scaling["factor"])
    if kind == "llama3" and scaling:
        return _llama3(base, scaling)
    raise CheckpointError(
        f"config.json asks for rope_type {kind!r}, which Ingle does not know; it knows "
        f"{', '.join(ROPE_TYPES)}."
    )


def _llama3(base: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / base
    blend = (trained / waves - low) / (high - low)
    blended = (1 - blend) * base / factor + blend * base
    long = torch.where(waves > trained / low, base / factor, base)
    between = (waves <= trained / low) & (waves >= trained / high)
    return torch.where(between, blended, long)


class RotaryTable:
    """Cosines and signed sines of every position, in the activation dtype.

    ``rotate`` computes ``x * cos + swapped_halves(x) * signed_sin`` where the sine of the first
    half carries the minus sign of the rotation.
    """

    def __init__(
        self, inverse: torch.Tensor, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.arange(num_positions).float()[:, None] * inverse[None, :]
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), -1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), -1).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin), each [T, 1, D], at ``positions`` int64 [T]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H, D] turned by its position; ``cos`` and ``sin`` as ``RotaryTable.at`` gives."""
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
    return torch.addcmul(x * cos, swapped, sin)
