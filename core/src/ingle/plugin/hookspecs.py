"""The hooks. A plugin implements any of them in the module its entry point names.

They are called once at start-up and never in the forward pass. None is ``firstresult``: core
collects every answer, chooses, and says why it chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from ingle.plugin.device import DeviceInfo
    from ingle.plugin.kv_cache import KVCacheFormat
    from ingle.plugin.linear import MatmulKernel, WeightFormat

PROJECT_NAME: Final = "ingle"
ENTRY_POINT_GROUP: Final = "ingle.plugins"
API_VERSION: Final = (0, 1)
"""Contract version. A plugin states ``INGLE_PLUGIN_API = (0, 1)``: same major, minor not newer."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def ingle_weight_formats() -> list[WeightFormat]:  # type: ignore[empty-body]
    """The weight formats this plugin reads. Called once, before the checkpoint is read."""


@hookspec
def ingle_matmul_kernels(device: DeviceInfo) -> list[MatmulKernel]:  # type: ignore[empty-body]
    """The matmul kernels this plugin has for ``device``. Called once per device."""


@hookspec
def ingle_kv_cache_formats(device: DeviceInfo) -> list[KVCacheFormat]:  # type: ignore[empty-body]
    """The KV-cache formats this plugin has for ``device``. Called before the cache is sized."""
