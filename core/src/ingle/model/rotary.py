"""Rotary position embedding: tables, and the rotation itself.

Shape letters: T tokens, H heads, D head size, R elements of a head that turn, P positions.
Source: "RoFormer" (Su et al. 2021) in the half-split form of Llama.
"""

from __future__ import annotations

import torch

from ingle.model.rope_frequencies import RopeFrequencies


class RotaryTable:
    """Cosines and signed sines of every position, in the activation dtype.

    ``rotate`` computes ``x * cos + swapped_halves(x) * signed_sin`` where the sine of the first
    half carries the minus sign of the rotation.
    """

    def __init__(
        self,
        frequencies: RopeFrequencies,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angles = torch.arange(num_positions).float()[:, None] * frequencies.inverse[None, :]
        gain = frequencies.gain
        cos, sin = angles.cos() * gain, angles.sin() * gain
        self.cos = torch.cat((cos, cos), -1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), -1).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin), each [T, 1, R], at ``positions`` int64 [T]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H, D] turned by its position; ``cos`` and ``sin`` as ``RotaryTable.at`` gives.

    Elements of a head past the first R stay as they are.
    """
    turning = cos.shape[-1]
    if turning != x.shape[-1]:
        return torch.cat((rotate(x[..., :turning], cos, sin), x[..., turning:]), -1)
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
    return torch.addcmul(x * cos, swapped, sin)
