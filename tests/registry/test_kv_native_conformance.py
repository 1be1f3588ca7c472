"""The conformance kit, applied to the native cache, core's own plugin."""

from __future__ import annotations

from ingle.testing import KVCacheFormatConformance


class TestNativeCache(KVCacheFormatConformance):
    plugin_module = "ingle.builtin.kv_native"
    format_name = "auto"
