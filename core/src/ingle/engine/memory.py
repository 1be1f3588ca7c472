"""Sizes the KV cache from memory, before it is allocated. All sizes in bytes.

The arithmetic is in ``memory_plan.py``; here it meets the device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.checkpoint.model_config import ModelConfig
from ingle.config import EngineConfig
from ingle.engine.cache_geometry import geometries
from ingle.engine.host_memory import available_host_bytes, resident_host_bytes
from ingle.engine.memory_plan import GIB, MIB, MemoryPlan, length_limit
from ingle.errors import CapacityError
from ingle.plugin.device import DeviceInfo
from ingle.plugin.kv_cache import KVCacheFormat

logger = logging.getLogger("ingle.engine")

CPU_CACHE_SEQUENCES = 4
"""Sequences of full length the cache holds by default on a CPU, where memory is the whole
machine's: room for a few dozen chats and their prefixes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """What else could be chosen, for the advice when a start does not fit.

    Attributes:
        caches: Bytes of a block in every cache format there is.
        eager_budget: Bytes the cache may take with --enforce-eager, which on a CPU saves what
            compiled decode steps read.
    """

    caches: Mapping[str, int] = field(default_factory=dict)
    eager_budget: int = 0


def available_bytes(device: DeviceInfo) -> int:
    """Memory free for use right now; all of a card that is absent."""
    if device.is_absent:
        return device.total_memory
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device.index)[0])
    return available_host_bytes()


def held_bytes(device: DeviceInfo) -> int | None:
    """Memory that is taken: by this process on a CPU, by everybody on a card. Only differences
    mean anything. None where the system does not say, and for a card that is absent."""
    if device.is_absent:
        return None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.index)
        return int(total - free)
    return resident_host_bytes()


def plan_cache(
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    budget: int,
    device_type: str,
    others: Alternatives,
) -> CachePlan:
    """Blocks and context length that fit ``budget``.

    A context that was asked for and does not fit is an error, or with ``--on-memory shrink``
    becomes the longest that does; ``auto`` shrinks in any case.

    Args:
        config: The options.
        model: The model.
        plan: What it takes, the cache apart.
        budget: Bytes the cache may take; negative when the rest alone is too much.
        device_type: ``cpu`` or ``cuda``.
        others: What else could be chosen, for the advice.

    Raises:
        ConfigError: When ``--max-model-len`` is more than the model can take.
        CapacityError: When the context asked for does not fit, or none does.
    """
    limit = length_limit(config, model)
    fitting = plan.longest(max(0, budget))
    exact = config.max_model_len != "auto" and config.on_memory == "error"
    if not fitting or (fitting < limit and exact):
        raise CapacityError(_too_small(config, limit, plan, budget, others))
    max_model_len = min(limit, fitting)
    if max_model_len < limit and config.max_model_len != "auto":
        logger.warning(
            "A context of %d tokens does not fit: SHRUNK TO %d (--on-memory shrink).",
            limit,
            max_model_len,
        )
    usable = fitting // plan.block_size
    return CachePlan(
        num_blocks=1 + min(usable, _most_blocks(config, device_type, max_model_len)),
        block_size=plan.block_size,
        max_model_len=max_model_len,
        block_bytes=plan.block_bytes,
    )


def _most_blocks(config: EngineConfig, device_type: str, max_model_len: int) -> int:
    """Blocks that can be of use, unless the size of the cache was asked for."""
    if config.kv_cache_memory_bytes is not None:
        return sys.maxsize
    per_sequence = -(-max_model_len // config.block_size)
    if device_type == "cpu":
        return CPU_CACHE_SEQUENCES * per_sequence
    # Without a prefix cache, more than every sequence at full length is never used.
    return sys.maxsize if config.enable_prefix_caching else config.max_running * per_sequence


def _too_small(
    config: EngineConfig, limit: int, plan: MemoryPlan, budget: int, others: Alternatives
) -> str:
    room = (
        f"{_size(budget)} is there"
        if budget >= 0
        else f"the rest alone (weights {_size(plan.weights_bytes)}) is {_size(-budget)} more than "
        "is free"
    )
    ways = list(_ways(config, limit, plan, budget, others))
    advice = (
        f"What would fit: {'; '.join(ways)}."
        if ways
        else "No flag makes room for it; more memory or a smaller model would."
    )
    return (
        f"one sequence of {limit} tokens needs {_size(plan.cache_bytes(limit))} of KV cache, but "
        f"{room}. {advice} `ingle fit {config.model}` shows every term."
    )


def _ways(
    config: EngineConfig, limit: int, plan: MemoryPlan, budget: int, others: Alternatives
) -> Iterator[str]:
    """Flags each of which makes it start; with a smaller cache the one that loses least."""
    fitting = plan.longest(max(0, budget))
    if fitting:
        yield f"--max-model-len {fitting} (--on-memory shrink takes it by itself)"
    if config.kv_cache_memory_bytes is not None:
        yield f"--kv-cache-memory-bytes {-(-plan.cache_bytes(limit) // MIB)}MiB"
    sizes = {others.caches[name]: name for name in sorted(others.caches, reverse=True)}
    smaller = sorted(size for size in sizes if size < plan.block_bytes)
    enough = [size for size in smaller if plan.blocks(limit) * size <= budget]
    if enough:
        yield f"--kv-cache-dtype {sizes[enough[-1]]}"
    elif smaller and not fitting and budget >= 2 * smaller[0]:
        tokens = (budget // smaller[0] - 1) * plan.block_size
        yield f"--kv-cache-dtype {sizes[smaller[0]]} --max-model-len {tokens}"
    eager = plan.longest(max(0, others.eager_budget))
    if eager >= limit or (eager > fitting and config.max_model_len == "auto"):
        yield "--enforce-eager (decode steps stay uncompiled, and slower)"
    elif eager and not fitting:
        yield f"--enforce-eager --max-model-len {eager}"


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def memory_report(
    plan: MemoryPlan,
    cache: CachePlan,
    before: int | None,
    after: int | None,
    is_compiled: bool = False,
) -> str:
    """One line: what weights and cache were predicted to take, and what loading took.

    Args:
        plan: The plan.
        cache: The cache that was allocated.
        before: ``held_bytes`` after the imports, before anything was loaded.
        after: ``held_bytes`` now.
        is_compiled: Whether decode steps are compiled already.
    """
    where = " (token embeddings in host memory)" if plan.embeddings_on_host else ""
    if plan.offloaded_layers:
        where += (
            f" (and {plan.offloaded_bytes / MIB:,.0f} of the last {plan.offloaded_layers} layers "
            "in host memory)"
        )
    predicted = predicted_bytes(plan, cache, is_compiled)
    compiled = plan.compiled_bytes / MIB
    text = (
        f"Memory: {predicted / MIB:,.0f} MiB predicted (weights {plan.weights_bytes / MIB:,.0f}"
        f"{where}, KV cache {cache.total_bytes / MIB:,.0f}"
        f"{f', compiled decode {compiled:,.0f}' if is_compiled and compiled else ''})"
    )
    if before is None or after is None:
        return f"{text}."
    measured = after - before
    off = 100 * (measured - predicted) / predicted
    return f"{text}, {measured / MIB:,.0f} MiB measured ({off:+.1f} %)."


def predicted_bytes(plan: MemoryPlan, cache: CachePlan, is_compiled: bool = False) -> int:
    """What is held once a model is loaded and before a step has run: weights, cache, tables, and
    with ``is_compiled`` what compiled decode steps read."""
    compiled = plan.compiled_bytes if is_compiled else 0
    return plan.weights_bytes + plan.workspace_bytes + cache.total_bytes + compiled


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
