"""The gated feed-forward block.

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingle.model.linear import Linear
from ingle.model.prompt_functions import PromptGate


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``.

    ``of_prompts``: the gate in one pass, where there is one for the activation.
    """

    gate_up_proj: Linear
    down_proj: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    of_prompts: PromptGate | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [T, E] (normed) to [T, E], plus ``residual`` [T, E] when it is given."""
        both = self.gate_up_proj(x)
        inner = None if self.of_prompts is None else self.of_prompts(both)
        if inner is None:
            gate, up = both.chunk(2, 1)
            inner = self.activation(gate) * up
        return self.down_proj(inner, residual)
