"""Loaded weights go to the device of the model, whichever device their format read them to."""

from __future__ import annotations

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import SequenceSpan
from ingle.builtin.dense_linear import DenseWeight
from ingle.builtin.kv_native import NativeKVCache
from ingle.model.weights import on_device
from ingle.plugin import AffineWeight, DeviceInfo, KVCacheGeometry


class MetaDevice(DeviceInfo):
    """A device of which every PyTorch has one: tensors on it have no data."""

    @property
    def torch_device(self) -> str:
        return "meta"


META = MetaDevice(type="cuda", capability=(8, 9))


def test_every_tensor_of_a_weight_moves() -> None:
    weight = AffineWeight(
        bits=4,
        group_size=32,
        in_features=64,
        out_features=16,
        codes=torch.zeros(16, 8, dtype=torch.int32),
        scales=torch.ones(2, 16),
        zeros=torch.ones(2, 16, dtype=torch.uint8),
        input_order=torch.randperm(64),
    )
    moved = on_device(weight, META)
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}
    assert moved.input_order is not None
    assert moved.input_order.device.type == "meta"


def test_a_weight_that_is_there_already_is_left_alone() -> None:
    weight = DenseWeight(torch.ones(2, 2))
    assert on_device(weight, DeviceInfo(type="cpu")) is weight


def test_a_cache_is_read_with_block_numbers_on_its_own_device() -> None:
    form = NativeKVCache()
    geometry = KVCacheGeometry(
        side="k", num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.float16
    )
    store = form.allocate(geometry, 4, META)
    cache = LayerCache(k_format=form, v_format=form, k_store=store, v_store=store)
    span = SequenceSpan(start=0, stop=1, seq_len=20, block_table=[3, 1, 2], first_block=None)
    key, _ = cache.read(span)
    assert key.shape == (2, 20, 8)
    assert key.device.type == "meta"
