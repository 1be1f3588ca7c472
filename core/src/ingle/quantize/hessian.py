"""The second moments of a linear's inputs, and the factor that spreads rounding errors with them.

Shape letters: K input features, T tokens.
Source: "GPTQ" (Frantar et al. 2022); Cholesky form and damping as in its code.
"""

from __future__ import annotations

import torch

from ingle.errors import CheckpointError

DAMP_STEP = 0.01
"""What damping grows by when a matrix is not positive definite even so."""


class Hessian:
    """``2 / T * sum(x x^T)`` in float32, as a running mean.

    Attributes:
        num_tokens: T so far.
    """

    def __init__(self, in_features: int, device: torch.device | None = None) -> None:
        self.num_tokens = 0
        self._mean = torch.zeros(in_features, in_features, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Takes ``x`` [T, K] in."""
        if not len(x):
            return
        total = self.num_tokens + len(x)
        rows = x.float()
        self._mean.mul_(self.num_tokens / total).addmm_(rows.T, rows, alpha=2.0 / total)
        self.num_tokens = total

    def matrix(self) -> torch.Tensor:
        """float32 [K, K]; not to be written in place."""
        return self._mean


def inverse_factor(hessian: torch.Tensor, damp: float) -> torch.Tensor:
    """Upper U with ``inverse(H + damp * mean(diag H) * I) = U^T U``: float32 [K, K].

    ``damp`` grows by ``DAMP_STEP`` until the factor exists.

    Args:
        hessian: [K, K], every diagonal element above zero; left as it is.
        damp: Share of the mean of the diagonal that is added to it.

    Raises:
        CheckpointError: When no damping below 1 helps: the inputs are not numbers.
    """
    mean = hessian.diagonal().mean()
    while damp < 1:
        damped = hessian.clone()
        damped.diagonal().add_(damp * mean)
        factor = _factor(damped)
        if factor is not None:
            return factor
        damp += DAMP_STEP
    raise CheckpointError(
        "the inputs of a linear cannot be used: their second moments stay singular under any "
        "damping. The model computes values that are not finite, or the calibration is one token."
    )


def _factor(matrix: torch.Tensor) -> torch.Tensor | None:
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        return None
    inverse = torch.cholesky_inverse(lower)
    upper: torch.Tensor
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if int(failed) or not bool(upper.isfinite().all()):
        return None
    return upper


def silence_dead_inputs(hessian: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gives inputs that are always zero a diagonal of one, so that the factor exists.

    Args:
        hessian: [K, K]; changed in place.
        weight: [N, K]; columns of dead inputs are set to zero in place.

    Returns:
        bool [K], true where an input is dead.
    """
    dead: torch.Tensor = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    weight[:, dead] = 0.0
    return dead
