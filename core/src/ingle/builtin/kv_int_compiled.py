"""How compiled decode steps on a CPU read and write integer caches; see ``kv_int_formats``.

Plain functions of tensors, for torch's compiler. ``stored``: codes [H, N, S, C], scales
[H, N, S, G].
"""

from __future__ import annotations

import torch

LARGEST_INT8 = 127

Rows = tuple[torch.Tensor, ...]


def read_int8(stored: Rows, constants: Rows) -> torch.Tensor:
    """See ``CompiledSide.read``."""
    codes, scales = stored
    return codes.float() * scales.float()


def write_int8(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``."""
    wide = row.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST_INT8).to(row.dtype)
    codes = torch.round(quotient(wide, scales.float())).clamp(-LARGEST_INT8, LARGEST_INT8)
    return codes.to(torch.int8), scales


def read_int4(stored: Rows, constants: Rows) -> torch.Tensor:
    """See ``CompiledSide.read``; what comes out is rotated."""
    codes, scales = stored
    halves = torch.cat((codes & 15, codes >> 4), -1).float() - 8.0
    groups = halves.view(*scales.shape, -1) * scales.float().unsqueeze(-1)
    return groups.flatten(-2)


def write_int4(row: torch.Tensor, constants: Rows) -> Rows:
    """See ``CompiledSide.write``; ``constants``: the rotation, and a tensor with as many elements
    as a token has scales."""
    rotation, counted = constants
    groups = (row.float() @ rotation).view(row.shape[0], counted.shape[0], -1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (torch.where(-low > high, low, high) / -8).to(row.dtype)
    codes = (torch.round(quotient(groups, scales.float())) + 8).clamp(0, 15)
    first, second = codes.to(torch.uint8).flatten(-2).chunk(2, -1)
    return first | (second << 4), scales.squeeze(-1)


def quotient(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``x / scales``, and zeros where the scale is zero or nothing can be divided."""
    return torch.where(scales == 0, 0.0, x / scales).nan_to_num(0.0)
