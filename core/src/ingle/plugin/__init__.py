"""The plugin contract: everything a format plugin needs, and nothing of the engine.

Importing this package imports neither torch nor triton, so a plugin's entry-point module stays
cheap. ``AffineWeight`` is imported on first use because it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingle.errors import CheckpointError, ConfigError, IngleError, PluginError
from ingle.plugin.checkpoint import CheckpointInfo, Detection, Support, TensorReader
from ingle.plugin.device import DeviceInfo
from ingle.plugin.hadamard import hadamard
from ingle.plugin.hookspecs import API_VERSION, ENTRY_POINT_GROUP, hookimpl, hookspec
from ingle.plugin.kv_cache import (
    CompiledSide,
    KVCacheFormat,
    KVCacheGeometry,
    KVStore,
    PagedSide,
    read_plain,
    write_plain,
)
from ingle.plugin.linear import (
    Epilogue,
    KernelUse,
    LinearSpec,
    LinearWeight,
    MatmulKernel,
    RowProduct,
    Shard,
    TritonDecode,
    WeightFormat,
    WeightLoader,
)
from ingle.plugin.quantizer import InputSource, LinearSite, Quantizer, QuantizerBlock

if TYPE_CHECKING:
    from ingle.plugin.affine import AffineWeight

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "AffineWeight",
    "CheckpointError",
    "CheckpointInfo",
    "CompiledSide",
    "ConfigError",
    "Detection",
    "DeviceInfo",
    "Epilogue",
    "IngleError",
    "InputSource",
    "KVCacheFormat",
    "KVCacheGeometry",
    "KVStore",
    "KernelUse",
    "LinearSite",
    "LinearSpec",
    "LinearWeight",
    "MatmulKernel",
    "PagedSide",
    "PluginError",
    "Quantizer",
    "QuantizerBlock",
    "RowProduct",
    "Shard",
    "Support",
    "TensorReader",
    "TritonDecode",
    "WeightFormat",
    "WeightLoader",
    "hadamard",
    "hookimpl",
    "hookspec",
    "read_plain",
    "write_plain",
]


def __getattr__(name: str) -> Any:
    if name == "AffineWeight":
        from ingle.plugin.affine import AffineWeight

        return AffineWeight
    raise AttributeError(f"module 'ingle.plugin' has no attribute {name!r}")
