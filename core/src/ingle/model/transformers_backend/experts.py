"""A layer's experts, in place of transformers' stacked ones.

Shape letters: T tokens, E hidden size, C experts a token visits, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ingle.model.experts import run_experts
from ingle.model.linear import Linear

_TRAITS: Final = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
"""transformers' experts that are computed here; others run by transformers' own code."""


def is_experts(module: torch.nn.Module) -> bool:
    """Whether ``module`` holds a layer's experts, of whichever kind."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def is_plain_experts(module: torch.nn.Module) -> bool:
    """Whether they are gated blocks without biases, stored one after another."""
    traits = (getattr(module, name, None) == value for name, value in _TRAITS.items())
    stacked = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(traits) and all(isinstance(p, torch.Tensor) and p.dim() == 3 for p in stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One expert; ``gate`` turns its joined projection [T, 2I] into [T, I]."""

    gate_up_proj: Linear
    down_proj: Linear
    gate: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E] to [T, E]."""
        return self.down_proj(self.gate(self.gate_up_proj(x)))


class Experts(torch.nn.Module):
    """All experts of a layer, called as transformers calls its own."""

    def __init__(self, experts: tuple[Expert, ...]) -> None:
        super().__init__()
        self._experts = experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden_states`` [T, E] to [T, E]; ``top_k_*`` are [T, C]."""
        weights = top_k_weights.to(hidden_states.dtype)
        return run_experts(self._experts, hidden_states, weights, top_k_index)


def gate_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gate of transformers' experts, without their parameters."""
    module.gate_up_proj = module.down_proj = None
    gate: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate
    return gate
