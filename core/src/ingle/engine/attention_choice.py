"""Which attention a model gets on its device: decided once, tried out, and said why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ingle.attention.gathered import GatheredAttention
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.attention.reference import ReferenceAttention
from ingle.attention.row_attention import RowAttention
from ingle.model.decoder import AttentionBackend
from ingle.plugin import DeviceInfo, KVCacheFormat, KVCacheGeometry

logger = logging.getLogger("ingle.engine")

BackendMaker = Callable[[int | None], AttentionBackend]
"""Makes attention for a layer's sliding window (None: all)."""

KERNEL_HEAD_DIM = 256
KERNEL_GROUP = 64
"""Query heads that may share a key/value head."""
KERNEL_BLOCK = 16
OLDEST = (8, 0)
"""Compute capability from which Triton's products and torch's flash attention run in 16 bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What attention must serve.

    Attributes:
        device: Where.
        dtype: Activation dtype.
        num_heads: Query heads.
        geometry: Of keys and of values.
        formats: Of keys and of values.
        scale: Factor on the logits.
        softcap: Bound of the scaled logits, or None.
    """

    device: DeviceInfo
    dtype: torch.dtype
    num_heads: int
    geometry: tuple[KVCacheGeometry, KVCacheGeometry]
    formats: tuple[KVCacheFormat, KVCacheFormat]
    scale: float
    softcap: float | None = None

    @property
    def has_flash(self) -> bool:
        """Whether torch has flash attention for it."""
        capability = self.device.capability or (0, 0)
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        is_known = capability >= OLDEST and is_half and self.geometry[0].head_dim <= 256
        return is_known and torch.backends.cuda.is_flash_attention_available()


def choose_attention(needs: AttentionNeeds) -> BackendMaker:
    """The fastest attention that is right here; on CUDA, a warning when that is not Triton's."""
    if needs.device.type == "cpu":
        rows = _row_attention(needs)
        return lambda window: PagedCPUAttention(needs.scale, window, needs.softcap, rows)
    reason = _unfit(needs)
    if not reason:
        from ingle.engine.attention_trial import paged_attention

        maker, reason = paged_attention(needs)
        if not reason:
            logger.info("Attention: Triton over the paged cache")
            return maker
    logger.warning("Attention gathers keys and values at every step: %s", reason)
    if needs.softcap is not None:
        return lambda window: ReferenceAttention(needs.scale, window, needs.softcap)
    return lambda window: GatheredAttention(needs.scale, window, has_flash=needs.has_flash)


def _row_attention(needs: AttentionNeeds) -> RowAttention | None:
    """What serves several sequences at once on a CPU, one for all layers."""
    geometry = needs.geometry[0]
    groups, rest = divmod(needs.num_heads, geometry.num_kv_heads)
    sizes = {one.head_dim for one in needs.geometry}
    if needs.dtype is not torch.bfloat16 or needs.softcap is not None or rest or len(sizes) > 1:
        return None
    return RowAttention(needs.scale, groups, geometry.head_dim)


def _unfit(needs: AttentionNeeds) -> str:
    """Why the Triton kernel cannot serve, or an empty string."""
    geometry = needs.geometry[0]
    size, group = geometry.block_size, needs.num_heads // geometry.num_kv_heads
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'ingle[triton]')"
    if (needs.device.capability or (0, 0)) < OLDEST:
        return f"compute capability {needs.device.capability} is below 8.0"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"activations in {needs.dtype}, not in 16 bit"
    if geometry.head_dim % 16 or geometry.head_dim > KERNEL_HEAD_DIM:
        return f"head size {geometry.head_dim}, the kernel serves multiples of 16 up to 256"
    if group > KERNEL_GROUP:
        return f"{group} query heads share a key/value head, the kernel serves {KERNEL_GROUP}"
    if size & (size - 1) or size < KERNEL_BLOCK:
        return f"--block-size {size} is not a power of two of at least {KERNEL_BLOCK}"
    return ""
