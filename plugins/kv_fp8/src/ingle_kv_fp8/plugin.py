"""The entry point: what this package adds to Ingle. Importing it loads neither torch nor triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingle.plugin import hookimpl

if TYPE_CHECKING:
    from ingle.plugin import DeviceInfo, KVCacheFormat

INGLE_PLUGIN_API = (0, 1)


@hookimpl
def ingle_kv_cache_formats(device: DeviceInfo) -> list[KVCacheFormat]:
    """e4m3 and e5m2, on every device."""
    from ingle_kv_fp8.format import Fp8E4M3Format, Fp8E5M2Format

    return [Fp8E4M3Format(), Fp8E5M2Format()]
