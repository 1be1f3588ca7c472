"""Both fp8 cache formats held to what every cache format is held to."""

from __future__ import annotations

from typing import ClassVar

from ingle.testing import KVCacheFormatConformance


class TestFp8E4M3(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle_kv_fp8.plugin"
    format_name: ClassVar[str] = "fp8_e4m3"


class TestFp8E5M2(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle_kv_fp8.plugin"
    format_name: ClassVar[str] = "fp8_e5m2"
