"""The conformance kit: inherit a class, supply a sample, and your plugin is tested.

Used in tests only; it needs pytest. Nothing of it is imported until it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingle.testing.checkpoint import MemoryCheckpoint, MemoryReader, memory_checkpoint
    from ingle.testing.kv_cache_format import KVCacheFormatConformance
    from ingle.testing.matmul_kernel import MatmulKernelConformance
    from ingle.testing.plugin_module import PluginConformance
    from ingle.testing.weight_format import WeightFormatConformance, WeightSample

__all__ = [
    "KVCacheFormatConformance",
    "MatmulKernelConformance",
    "MemoryCheckpoint",
    "MemoryReader",
    "PluginConformance",
    "WeightFormatConformance",
    "WeightSample",
    "memory_checkpoint",
]

_HOMES = {
    "KVCacheFormatConformance": "kv_cache_format",
    "MatmulKernelConformance": "matmul_kernel",
    "MemoryCheckpoint": "checkpoint",
    "MemoryReader": "checkpoint",
    "PluginConformance": "plugin_module",
    "WeightFormatConformance": "weight_format",
    "WeightSample": "weight_format",
    "memory_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ingle.testing' has no attribute {name!r}")
    return getattr(import_module(f"ingle.testing.{_HOMES[name]}"), name)
