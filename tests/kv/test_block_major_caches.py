"""Caches laid out as on CUDA, held to what every cache format is held to, with tensors on a CPU."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch

from ingle.builtin.kv_int_formats import Int4KVCache, Int8KVCache
from ingle.builtin.kv_native import NativeKVCache
from ingle.plugin import DeviceInfo, KVCacheFormat, KVCacheGeometry
from ingle.testing import KVCacheFormatConformance
from ingle_kv_fp8.format import Fp8E4M3Format, Fp8E5M2Format


class CardOnCpu(DeviceInfo):
    """Says ``cuda`` where formats ask what it is, and ``cpu`` where torch asks where it is."""

    @property
    def torch_device(self) -> str:
        return "cpu"


CARD = CardOnCpu(type="cuda", capability=(8, 9))


class TestNativeOnCuda(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.kv_native"
    format_name: ClassVar[str] = "auto"
    device: ClassVar[DeviceInfo] = CARD


class TestFp8E4M3OnCuda(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle_kv_fp8.plugin"
    format_name: ClassVar[str] = "fp8_e4m3"
    device: ClassVar[DeviceInfo] = CARD


class TestFp8E5M2OnCuda(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle_kv_fp8.plugin"
    format_name: ClassVar[str] = "fp8_e5m2"
    device: ClassVar[DeviceInfo] = CARD


class TestInt8OnCuda(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.kv_int"
    format_name: ClassVar[str] = "int8"
    device: ClassVar[DeviceInfo] = CARD


class TestInt4OnCuda(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.kv_int"
    format_name: ClassVar[str] = "int4"
    device: ClassVar[DeviceInfo] = CARD


FORMS = (NativeKVCache(), Int8KVCache(), Int4KVCache(), Fp8E4M3Format(), Fp8E5M2Format())


def geometry(side: Literal["k", "v"]) -> KVCacheGeometry:
    return KVCacheGeometry(
        side=side, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float16
    )


@pytest.mark.parametrize("form", [NativeKVCache(), Fp8E4M3Format(), Fp8E5M2Format()])
def test_blocks_lie_as_decode_attention_reads_them(form: KVCacheFormat) -> None:
    shapes = {"k": (3, 2, 16, 32), "v": (3, 2, 32, 16)}
    for side, shape in shapes.items():
        store = form.allocate(geometry(side), 3, CARD)
        paged = store.paged()
        assert paged is not None
        blocks = paged.tensors[0]
        assert blocks.shape == shape
        assert blocks.is_contiguous()
        x = torch.randn(1, 2, 32).half()
        form.write(store, x, torch.tensor([2 * 16 + 5]))
        stored = blocks[2, :, 5] if side == "k" else blocks[2, :, :, 5]
        assert bool(stored.any())
        assert not blocks[:2].any()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_on_a_cpu_there_is_nothing_for_triton_to_read(form: KVCacheFormat) -> None:
    assert form.allocate(geometry("v"), 3, DeviceInfo(type="cpu")).paged() is None
