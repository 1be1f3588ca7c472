"""Sizes the KV cache from memory, before it is allocated. All sizes in bytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.checkpoint.model_config import ModelConfig
from ingle.config import EngineConfig
from ingle.errors import CapacityError, ConfigError
from ingle.plugin.checkpoint import TensorReader
from ingle.plugin.device import DeviceInfo
from ingle.plugin.kv_cache import KVCacheFormat, KVCacheGeometry

GIB = 1024**3
CPU_CACHE_LIMIT = 4 * GIB
"""Default ceiling of the cache on a CPU, as other engines have it; --kv-cache-memory-bytes lifts
it."""
CPU_CACHE_SHARE = 0.4
"""Share of a CPU machine's available memory the cache may take by default."""
CPU_CACHE_SEQUENCES = 4
"""Sequences of full length the cache holds by default on a CPU, where memory is the whole
machine's: room for a few dozen chats and their prefixes."""
CUDA_WORKSPACE = GIB
"""Left on a card for activations and workspace: a chunk of 2,048 tokens of an 8B model's widest
layer in 16 bit is about 0.1 GiB, several of which live at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What the cache will be.

    Attributes:
        num_blocks: Blocks, the null block included.
        block_size: Tokens per block.
        max_model_len: Tokens per sequence at most.
        block_bytes: Bytes of one block over all layers and both sides.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes the whole cache takes."""
        return self.num_blocks * self.block_bytes


def geometries(
    model: ModelConfig, block_size: int, dtype: torch.dtype
) -> tuple[KVCacheGeometry, KVCacheGeometry]:
    """The shape of keys and of values in one layer."""
    k, v = (
        KVCacheGeometry(
            side=side,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            dtype=dtype,
        )
        for side in ("k", "v")
    )
    return k, v


def available_bytes(device: DeviceInfo) -> int:
    """Memory free for use right now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device.index)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * GIB


def cache_budget(config: EngineConfig, device: DeviceInfo, free: int) -> int:
    """Bytes the cache may take: what was asked for, else a share of what is free."""
    if config.kv_cache_memory_bytes is not None:
        return int(config.kv_cache_memory_bytes)
    if device.type == "cpu":
        return min(CPU_CACHE_LIMIT, int(free * CPU_CACHE_SHARE))
    reserve = int(device.total_memory * (1 - config.gpu_memory_utilization))
    return max(0, free - reserve - CUDA_WORKSPACE)


def plan_cache(
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceInfo,
    block_bytes: int,
    budget: int,
) -> CachePlan:
    """Blocks and context length that fit ``budget``.

    Raises:
        ConfigError: When ``--max-model-len`` is more than the model can take.
        CapacityError: When the context asked for does not fit.
    """
    size = config.block_size
    limit = _length_limit(config, model)
    fitting = budget // block_bytes - 1
    wanted = -(-limit // size)
    if fitting < 1 or (fitting < wanted and config.max_model_len != "auto"):
        raise CapacityError(_too_small(limit, block_bytes, budget, fitting * size, wanted))
    max_model_len = min(limit, fitting * size)
    return CachePlan(
        num_blocks=1 + min(fitting, _most_blocks(config, device, max_model_len)),
        block_size=size,
        max_model_len=max_model_len,
        block_bytes=block_bytes,
    )


def _most_blocks(config: EngineConfig, device: DeviceInfo, max_model_len: int) -> int:
    """Blocks that can be of use, unless the size of the cache was asked for."""
    if config.kv_cache_memory_bytes is not None:
        return sys.maxsize
    per_sequence = -(-max_model_len // config.block_size)
    if device.type == "cpu":
        return CPU_CACHE_SEQUENCES * per_sequence
    # Without a prefix cache, more than every sequence at full length is never used.
    return sys.maxsize if config.enable_prefix_caching else config.max_running * per_sequence


def _length_limit(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len == "auto":
        return model.max_position_embeddings
    longest = model.longest_context
    asked = int(config.max_model_len)
    if asked > longest:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's {longest} positions "
            f"(max_position_embeddings in config.json); use at most {longest}."
        )
    return asked


def _too_small(limit: int, block_bytes: int, budget: int, fitting: int, wanted: int) -> str:
    need = (wanted + 1) * block_bytes
    return (
        f"one sequence of {limit} tokens needs {need / GIB:.2f} GiB of KV cache, but "
        f"{budget / GIB:.2f} GiB is there. Use --max-model-len {max(fitting, 0)} or less, "
        "a smaller --kv-cache-dtype (fp8 halves it), or a larger --kv-cache-memory-bytes."
    )


def allocate_caches(
    model: ModelConfig,
    plan: CachePlan,
    formats: tuple[KVCacheFormat, KVCacheFormat],
    dtype: torch.dtype,
    device: DeviceInfo,
) -> tuple[LayerCache, ...]:
    """One cache per layer, as planned."""
    k_geometry, v_geometry = geometries(model, plan.block_size, dtype)
    k_format, v_format = formats
    return tuple(
        LayerCache(
            k_format=k_format,
            v_format=v_format,
            k_store=k_format.allocate(k_geometry, plan.num_blocks, device),
            v_store=v_format.allocate(v_geometry, plan.num_blocks, device),
        )
        for _ in range(model.num_layers)
    )


def load_cache_scales(caches: Sequence[LayerCache], reader: TensorReader) -> int:
    """Gives every layer the scales the checkpoint has for it; returns how many sides had some."""
    found = 0
    for index, cache in enumerate(caches):
        name = f"model.layers.{index}.self_attn"
        found += bool(cache.k_format.load_scales(cache.k_store, name, reader))
        found += bool(cache.v_format.load_scales(cache.v_store, name, reader))
    return found
