"""The gated feed-forward block.

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingle.model.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``."""

    gate_up_proj: Linear
    down_proj: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [T, E] (normed) to [T, E], plus ``residual`` [T, E] when it is given."""
        gate, up = self.gate_up_proj(x).chunk(2, 1)
        return self.down_proj(self.activation(gate) * up, residual)
