"""Where checkpoints keep the scales of an fp8 cache, and how they are read.

Names as vLLM knows them, from llm-compressor, ModelOpt, older compressed-tensors files and the
models that have names of their own.

Letters: H key/value heads.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from ingle.plugin import CheckpointError

if TYPE_CHECKING:
    import torch

    from ingle.plugin import KVCacheGeometry, TensorReader

logger = logging.getLogger("ingle.kv_fp8")

SUFFIXES = (
    "{side}_scale",
    "{side}_proj.{side}_scale",
    "qkv_proj.{side}_scale",
    "qkqkv_proj.{side}_scale",
    "{side}_cache.scale",
    "{side}_proj.output_scale",
)
UNSET = -1.0
SHARED_SUFFIX = "kv_scale"
"""Legacy: one scale for keys and values."""


def read_scales(
    layer_name: str, geometry: KVCacheGeometry, reader: TensorReader
) -> torch.Tensor | None:
    """This side's scale of one layer: float32 [1] or [H], or None when there is none.

    A tensor of zeros or of -1, which is how vLLM marks a scale that was never set, counts as none.
    Values without a scale take the one of the keys, as every reader of these files does.

    Raises:
        CheckpointError: Naming the tensor when its shape fits neither one scale nor one per head,
            or a scale is not a positive number.
    """
    import torch

    for tensor in _candidates(layer_name, geometry.side, reader):
        scales = reader.get(tensor).to(torch.float32).flatten()
        if not bool(((scales == 0) | (scales == UNSET)).all()):
            return _checked(tensor, scales, geometry)
        logger.info("%s holds %s, which means no scale.", tensor, scales.tolist())
    return None


def _checked(tensor: str, scales: torch.Tensor, geometry: KVCacheGeometry) -> torch.Tensor:
    """``scales`` cut to this rank's heads."""
    last = geometry.first_kv_head + geometry.num_kv_heads
    if scales.numel() != 1:
        if scales.numel() < last:
            raise CheckpointError(
                f"{tensor} holds {scales.numel()} scales; this model wants 1, or one for each of "
                f"its {last} key/value heads."
            )
        scales = scales[geometry.first_kv_head : last]
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise CheckpointError(
            f"{tensor} holds {scales.tolist()}; a scale must be a positive, finite number."
        )
    return scales.clone()


def _candidates(layer_name: str, side: Literal["k", "v"], reader: TensorReader) -> tuple[str, ...]:
    """The tensors there are, the most specific first."""
    known = set(reader.names(f"{layer_name}."))
    candidates = [suffix.format(side=side) for suffix in SUFFIXES] + [SHARED_SUFFIX]
    if side == "v":
        candidates += [suffix.format(side="k") for suffix in SUFFIXES]
    names = (f"{layer_name}.{suffix}" for suffix in candidates)
    return tuple(name for name in names if name in known)
