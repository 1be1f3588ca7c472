"""How far off a result is, and how far off it may be.

Shape letters: N output features, K input features, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

SEED = 20260102
CAP_FACTOR = 2.0
"""A kernel may be at most this many times as far off as torch's own product in that dtype."""


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted|| (Frobenius), computed in float64; 0 for empty tensors."""
    exact = wanted.double()
    size = torch.linalg.vector_norm(exact)
    difference = torch.linalg.vector_norm(found.double() - exact)
    return float(difference / size) if size > 0 else float(difference)


def normal(*shape: int, dtype: torch.dtype, seed: int = SEED) -> torch.Tensor:
    """Standard normal values, the same ones for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def torch_error(weight: torch.Tensor, dtype: torch.dtype) -> float:
    """The error of torch's own product in ``dtype`` against float64, for ``weight [N, K]``."""
    x = normal(64, weight.shape[1], dtype=dtype)
    found = torch.nn.functional.linear(x, weight.to(dtype))
    return relative_error(found, x.double() @ weight.double().t())


def capped_bound(declared: Mapping[str, float], weight: torch.Tensor, dtype: torch.dtype) -> float:
    """What a product may be off by: the declared bound, but never more than twice torch's own."""
    name = str(dtype).removeprefix("torch.")
    assert name in declared, f"max_relative_error says nothing about {name}"
    return min(declared[name], CAP_FACTOR * torch_error(weight, dtype))
