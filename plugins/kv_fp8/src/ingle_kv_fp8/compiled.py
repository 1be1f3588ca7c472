"""How compiled decode steps on a CPU read and write fp8 caches.

Plain functions of tensors, for torch's compiler, which has vector code for both types. ``stored``:
codes [H, N, S, D] in torch's type for them. ``constants``: last float32 [H, 1] scales, before them
[D, D] what keys are multiplied by, where they are.
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LARGEST_TURNED = 1e30

Rows = tuple[torch.Tensor, ...]


def read(stored: Rows, constants: Rows) -> torch.Tensor:
    """See ``CompiledSide.read``."""
    return stored[0].float() * constants[-1][:, :, None, None]


def write_e4m3(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    return (_encoded(row, constants[0], torch.float8_e4m3fn),)


def write_e5m2(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    return (_encoded(row, constants[0], torch.float8_e5m2),)


def write_turned_e4m3(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    return (_encoded(_turned(row, constants[0]), constants[1], torch.float8_e4m3fn),)


def write_turned_e5m2(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    return (_encoded(_turned(row, constants[0]), constants[1], torch.float8_e5m2),)


def _turned(row: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """See ``Fp8Store.turned``."""
    return row.float().clamp(-LARGEST_TURNED, LARGEST_TURNED) @ rotation


def _encoded(row: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest, ties to even, saturating: clamped first, and clamp lets NaN through."""
    largest = LARGEST[dtype]
    return (row.float() / scale).clamp(-largest, largest).to(dtype)
