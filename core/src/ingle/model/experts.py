"""A mixture of experts: a router that picks a few feed-forward blocks for every token.

Shape letters: T tokens, E hidden size, X experts, C experts a token visits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ingle.model.feed_forward import MLP
from ingle.model.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """The expert that every token visits, weighted by a gate of its own."""

    mlp: MLP
    gate: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E] (normed) to [T, E]."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMLP:
    """Routed experts, in place of a layer's one MLP.

    Attributes:
        router: [T, E] to one logit per expert, [T, X].
        experts: X blocks.
        num_chosen: C.
        normalise: Whether a token's C weights are made to sum to one.
        shared: The expert every token visits, or None.
    """

    router: Linear
    experts: tuple[MLP, ...]
    num_chosen: int
    normalise: bool
    shared: SharedExpert | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [T, E] (normed) to [T, E], plus ``residual`` [T, E] when it is given."""
        weights, chosen = self.route(x)
        out = run_experts(self.experts, x, weights, chosen)
        if self.shared is not None:
            out = out + self.shared(x)
        return out if residual is None else out + residual

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's weights, in ``x``'s dtype, and experts, int64: both [T, C]."""
        shares = torch.softmax(self.router(x), -1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.num_chosen, -1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen


Block = Callable[[torch.Tensor], torch.Tensor]
"""A feed-forward block, [T, E] to [T, E]."""


def run_experts(
    experts: Sequence[Block], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Every token's experts ``chosen`` int64 [T, C], summed by their ``weights`` [T, C], in ``x``'s
    dtype: [T, E]."""
    if len(x) == 1:
        outputs = [experts[index](x) for index in chosen[0].tolist()]
        return weights @ torch.cat(outputs)
    return _by_expert(experts, x, weights, chosen)


def _by_expert(
    experts: Sequence[Block], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Visits sorted by expert, so that each expert runs once over all of its tokens."""
    num_chosen = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    rows = order // num_chosen
    outputs = [
        expert(part)
        for expert, part in zip(experts, torch.split(x[rows], counts), strict=True)
        if len(part)
    ]
    joined = torch.cat(outputs)
    # Back in the tokens' order before summing: the sum does not depend on the batch.
    placed = torch.empty_like(joined).index_copy_(0, order, joined)
    visits = placed.view(len(x), num_chosen, -1)
    return torch.bmm(weights.unsqueeze(1), visits).squeeze(1)
