"""The entry point of the integer caches: int8 and int4. Importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingle.plugin import hookimpl

if TYPE_CHECKING:
    from ingle.plugin import DeviceInfo, KVCacheFormat

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_kv_cache_formats(device: DeviceInfo) -> list[KVCacheFormat]:
    """int8 and int4, on every device."""
    from ingle.builtin.kv_int_formats import Int4KVCache, Int8KVCache

    return [Int8KVCache(), Int4KVCache()]
