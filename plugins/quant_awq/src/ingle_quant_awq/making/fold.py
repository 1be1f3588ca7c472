"""Moves factors on a linear's inputs into what gives them.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ingle.plugin import CheckpointError, InputSource, QuantizerBlock

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def fold_into_norm(
    block: QuantizerBlock,
    source: InputSource,
    scales: torch.Tensor,
    stored_dtypes: Mapping[str, str],
) -> torch.Tensor:
    """Divides a norm by ``scales`` [K]; gives the factors that its rounded weight really has.

    The norm is stored in the model's dtype. A bfloat16 keeps 8 bits of a quotient, so the linears
    are multiplied with what was kept, not with what was wanted: the fold stays exact.
    """
    assert source.norm is not None
    found = block.tensor(source.norm)
    if found is None:
        raise CheckpointError(f"the norm {source.norm} is not in the block {block.name}.")
    dtype = _DTYPES.get(stored_dtypes.get(source.norm, ""), torch.float32)
    applied = found + source.norm_offset
    divided = (applied / scales - source.norm_offset).to(dtype).float()
    real = applied / (divided + source.norm_offset)
    usable = real.isfinite() & (real > 0)
    block.set_tensor(source.norm, torch.where(usable, divided, found))
    return torch.where(usable, real, torch.ones_like(real))


def fold_into_linear(block: QuantizerBlock, source: InputSource, scales: torch.Tensor) -> None:
    """Divides the outputs of a linear, bias included, by ``scales`` [K]."""
    assert source.linear is not None
    rows = slice(*source.rows)
    weight = block.weight(source.linear).clone()
    weight[rows] /= scales[:, None]
    block.set_weight(source.linear, weight)
    bias = block.tensor(f"{source.linear}.bias")
    if bias is not None:
        bias = bias.clone()
        bias[rows] /= scales
        block.set_tensor(f"{source.linear}.bias", bias)
