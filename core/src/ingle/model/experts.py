"""A mixture of experts: a router that picks a few feed-forward blocks for every token.

Shape letters: T tokens, E hidden size, X experts, C experts a token visits.
"""

from __future__ import annotations

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
        out = (
            self._one_token(x, weights, chosen)
            if len(x) == 1
            else self._by_expert(x, weights, chosen)
        )
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

    def _one_token(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        outputs = [self.experts[index](x) for index in chosen[0].tolist()]
        return weights @ torch.cat(outputs)

    def _by_expert(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Visits sorted by expert, so that each expert runs once over all of its tokens."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = order // self.num_chosen
        outputs = [
            expert(part)
            for expert, part in zip(self.experts, torch.split(x[rows], counts), strict=True)
            if len(part)
        ]
        joined = torch.cat(outputs)
        # Back in the tokens' order before summing: the sum does not depend on the batch.
        placed = torch.empty_like(joined).index_copy_(0, order, joined)
        visits = placed.view(len(x), self.num_chosen, -1)
        return torch.bmm(weights.unsqueeze(1), visits).squeeze(1)
