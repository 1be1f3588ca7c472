"""The shape of a model's KV cache. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ingle.checkpoint.model_config import ModelConfig
from ingle.engine.dtype_choice import PlannedDType
from ingle.plugin.kv_cache import KVCacheGeometry

if TYPE_CHECKING:
    import torch


def geometries(
    model: ModelConfig, block_size: int, dtype: torch.dtype | PlannedDType
) -> tuple[KVCacheGeometry, KVCacheGeometry]:
    """The shape of keys and of values in one layer."""
    k, v = (
        KVCacheGeometry(
            side=side,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            # A plan made without torch says no more than the size; the contract says so.
            dtype=cast("torch.dtype", dtype),
        )
        for side in ("k", "v")
    )
    return k, v
