"""A rotation that spreads what a few dimensions hold over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def hadamard(size: int, device: str) -> torch.Tensor:
    """Sylvester's Hadamard matrix, orthonormal, of the largest power of two that divides ``size``,
    as often along the diagonal as it takes: float32 [size, size], its own inverse."""
    import torch

    part = torch.ones(1, 1)
    while size % (2 * part.shape[0]) == 0:
        part = torch.cat((torch.cat((part, part), 1), torch.cat((part, -part), 1)))
    parts = size // part.shape[0]
    rotation = torch.kron(torch.eye(parts), part / part.shape[0] ** 0.5)
    return rotation.to(device)
