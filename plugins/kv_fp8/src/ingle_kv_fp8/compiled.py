"""How compiled decode steps on a CPU read and write fp8 caches.

Plain functions of tensors, for torch's compiler, which has vector code for both types. ``stored``:
codes [H, N, S, D] in torch's type for them. ``constants``: float32 [H, 1] scales.
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

Rows = tuple[torch.Tensor, ...]


def read(stored: Rows, constants: Rows) -> torch.Tensor:
    """See ``CompiledSide.read``."""
    return stored[0].float() * constants[0][:, :, None, None]


def write_e4m3(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    return (_encoded(row, constants[0], torch.float8_e4m3fn),)


def write_e5m2(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    return (_encoded(row, constants[0], torch.float8_e5m2),)


def _encoded(row: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest, ties to even, saturating: clamped first, and clamp lets NaN through."""
    largest = LARGEST[dtype]
    return (row.float() / scale).clamp(-largest, largest).to(dtype)
