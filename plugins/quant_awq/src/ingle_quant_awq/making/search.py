"""AWQ's two searches: factors on a linear's inputs, and bounds on its weights.

Shape letters: N output features, K input features, G groups, g inputs of a group, T tokens.
Source: "AWQ" (Lin et al. 2023), as AutoAWQ 0.2.9 carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from ingle_quant_awq.making.grid import Grid

RATIOS: Final = tuple(step / 20 for step in range(20))
"""Powers of the activations that the search tries."""
SHRINKS: Final = tuple(1 - step / 20 for step in range(10))
"""Shares of a group's largest weight that the clip search tries."""
CLIP_TOKENS: Final = 512
_LEAST: Final = 1e-4

Loss = Callable[[Sequence[torch.Tensor]], float]
"""Given weights in place of the originals, how far the outputs move."""


def weight_importance(weights: Sequence[torch.Tensor], grid: Grid) -> torch.Tensor:
    """Mean over all rows of each weight's size against its group's largest: float32 [K]."""
    joined = torch.cat([grid.grouped(weight).abs() for weight in weights])
    shares = joined / (joined.amax(2, keepdim=True) + 1e-6)
    return shares.flatten(1).mean(0)


def candidate_scales(
    activation: torch.Tensor, importance: torch.Tensor | None, ratio: float
) -> torch.Tensor:
    """Factors [K] for one ratio; ``importance`` None leaves the weights out (llm-awq)."""
    if importance is None:
        scales = activation.pow(ratio).clamp(min=_LEAST)
    else:
        scales = activation.pow(ratio) / (importance.pow(1 - ratio) + _LEAST)
        scales = scales.clamp(min=_LEAST)
    scales = scales / (scales.max() * scales.min()).sqrt()
    return torch.where(scales.isfinite(), scales, torch.ones_like(scales))


def search_scales(
    weights: Sequence[torch.Tensor],
    activation: torch.Tensor,
    grid: Grid,
    loss: Loss,
    duo: bool,
) -> torch.Tensor:
    """The factors [K] with the least loss of ``weights`` (each [N, K]) once they are rounded.

    Args:
        weights: Linears that read the same input.
        activation: Mean size of each input, float32 [K].
        grid: What they are rounded to.
        loss: Called once for each ratio.
        duo: Whether weights count.
    """
    importance = weight_importance(weights, grid) if duo else None
    best, kept = float("inf"), torch.ones_like(activation)
    for ratio in RATIOS:
        scales = candidate_scales(activation, importance, ratio)
        found = loss([grid.round(weight * scales) / scales for weight in weights])
        if found < best:
            best, kept = found, scales
    return kept


def search_clip(weight: torch.Tensor, x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The bound of each row and group that moves the group's share of the output least.

    The error over tokens is a quadratic form of the change in weights, so the tokens are summed
    up once, as each group's [g, g] product of inputs with themselves.

    Args:
        weight: float32 [N, K].
        x: Its inputs, float32 [T, K].
        grid: What it is rounded to.

    Returns:
        float32 [N, G].
    """
    step = max(1, len(x) // CLIP_TOKENS)
    groups = grid.grouped(weight)
    inputs = grid.grouped(x[::step]).transpose(0, 1)
    moments = inputs.transpose(1, 2) @ inputs
    largest = groups.abs().amax(2, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    kept = largest.clone()
    for share in SHRINKS:
        bound = largest * share
        clipped = torch.clamp(groups, -bound, bound)
        change = grid.round(clipped.flatten(1)).view(groups.shape) - groups
        by_group = change.transpose(0, 1)
        error = ((by_group @ moments) * by_group).sum(2).T.unsqueeze(2)
        better = error < best
        best = torch.where(better, error, best)
        kept = torch.where(better, bound, kept)
    return kept.squeeze(2)


def clip(weight: torch.Tensor, bounds: torch.Tensor, grid: Grid) -> torch.Tensor:
    """``weight`` [N, K] within ``bounds`` [N, G]."""
    limit = bounds.unsqueeze(2)
    return torch.clamp(grid.grouped(weight), -limit, limit).view(weight.shape)
