"""The small layers around the linears.

Shape letters: T tokens, E hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ingle.errors import CheckpointError
from ingle.model.prompt_functions import GATED_GELU_TANH, GATED_SILU, PromptGate, PromptNorm
from ingle.plugin.compiled_function import Compilable


class RMSNorm:
    """Root-mean-square norm: ``weight * (x / rms(x))``, the division in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.of_prompts = PromptNorm(weight, eps)
        self._size = weight.shape[0]
        self._scalar = weight.device.type == "cpu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E] (or [T, H, D] for per-head norms), normed over the last dimension."""
        if self._scalar and x.numel() == self._size:
            return self._one_row(x)
        found = self.of_prompts(x)
        return self._by_operators(x) if found is None else found

    def _by_operators(self, x: torch.Tensor) -> torch.Tensor:
        full = x.float()
        mean_square = full.square().mean(-1, keepdim=True)
        return (full * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight

    def _one_row(self, x: torch.Tensor) -> torch.Tensor:
        """One row on a CPU: the scale as a Python number saves half of the operator calls."""
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float32))
        return x * (1.0 / math.sqrt(norm * norm / self._size + self.eps)) * self.weight


class FullRMSNorm(RMSNorm):
    """The same in float32 up to and including the weight: rounded once, at the end.

    Gemma (whose weight is stored less one) and OLMo 2 are trained so.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__(weight.float() + offset, eps)

    def _one_row(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_operators(x)

    def _by_operators(self, x: torch.Tensor) -> torch.Tensor:
        full = x.float()
        mean_square = full.square().mean(-1, keepdim=True)
        return (full * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


class ProjectionNorm:
    """A norm over all heads of a projection at once."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H, D], normed over the last two dimensions together."""
        return self.norm(x.flatten(1)).view(x.shape)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu,
}


_GATES: dict[Callable[[torch.Tensor], torch.Tensor], Compilable] = {
    torch.nn.functional.silu: GATED_SILU,
    _gelu_tanh: GATED_GELU_TANH,
}


def prompt_gate(activation: Callable[[torch.Tensor], torch.Tensor]) -> PromptGate | None:
    """The gate of prompts with that activation, where there is one."""
    source = _GATES.get(activation)
    return None if source is None else PromptGate(source)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation a config names.

    Raises:
        CheckpointError: When the name is unknown.
    """
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise CheckpointError(
            f"config.json asks for the activation {name!r}, which Ingle does not know; "
            f"it knows {known}."
        )
    return _ACTIVATIONS[name]
