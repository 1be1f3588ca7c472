"""The tuner of 4-bit products, with a timer that is made up: what it measures, and what a load
makes of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingle.builtin.affine_cuda_kernel import W4CudaKernel
from ingle.builtin.affine_triton import PackedW4, W4Config, default_w4_config, pack_w4
from ingle.builtin.split_k_triton import MAX_TILES
from ingle.builtin.w4_tuning import w4_launches
from ingle.engine.linear_tuning import tune_linears
from ingle.engine.model_runner import ModelRunner
from ingle.model.linear import Linear, PreparedWeight
from ingle.plugin import AffineWeight, DeviceInfo

CARD = DeviceInfo(
    type="cuda", capability=(8, 6), name="NVIDIA GeForce RTX 3090", multi_processors=82
)


def packed_weight(n: int = 128, k: int = 2048, group: int = 128) -> PackedW4:
    codes = torch.zeros(n, k, dtype=torch.uint8)
    return pack_w4(codes, torch.ones(k // group, n).half(), None, group)


def affine_weight() -> AffineWeight:
    return AffineWeight(
        bits=4,
        group_size=128,
        in_features=2048,
        out_features=128,
        codes=torch.zeros(128, 256, dtype=torch.int32),
        scales=torch.ones(16, 128).half(),
    )


@pytest.mark.parametrize("shape", [(64, 128), (128, 2048), (4096, 4096), (28672, 4096)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_launches_are_such_as_the_kernel_takes(shape: tuple[int, int], group: int) -> None:
    packed = packed_weight(64, 128, group)
    words = torch.empty(shape[0] // 16, shape[1] // 128, 2, 32, 8, dtype=torch.int16, device="meta")
    packed = replace(packed, words=words, out_features=shape[0], in_features=shape[1])
    first, *found = w4_launches(packed, 82)
    assert first == default_w4_config(packed, 82)
    assert len({first, *found}) == len(found) + 1
    for config in found:
        assert shape[0] % config.block_n == 0
        assert config.splits == 1 or shape[1] // 128 >= 4 * config.splits
        assert config.splits == 1 or shape[0] // config.block_n <= MAX_TILES
        assert not (config.prefetch and group < 128)  # it spills


def test_a_load_reads_what_was_measured_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path))
    weight: Any = W4CudaKernel(CARD).prepare(affine_weight())
    assert weight.config == default_w4_config(weight.packed, 82)
    wanted = W4Config(block_n=64, splits=2, prefetch=False)
    product = SimpleNamespace(seconds=lambda config: 1e-6 if config == wanted else 2e-6)
    where = "ingle.builtin.affine_cuda_kernel.w4_product"
    monkeypatch.setattr(where, lambda packed, device, dtype, default: product)
    line = W4CudaKernel(CARD).tune(weight, torch.float16)
    assert "128x2048" in line
    assert "1.0 us" in line
    monkeypatch.setattr(where, None)
    again: Any = W4CudaKernel(CARD).prepare(affine_weight())
    assert again.config == wanted
    assert W4CudaKernel(CARD).tune(affine_weight(), torch.float16) == ""


@dataclass(frozen=True)
class Layer:
    first: Linear
    second: Linear


def test_each_kind_of_weight_of_a_model_is_measured_once() -> None:
    numbers = itertools.count(1)
    kernel: Any = SimpleNamespace(name="k", tune=lambda weight, dtype: f"{next(numbers)}")

    def linear(n: int) -> Linear:
        weight: Any = SimpleNamespace(
            tensors=lambda: {"w": torch.zeros(n, 2)}, out_features=n,
            input_order=None, input_scale=None, stored_out_features=n, output_rows=None,
        )  # fmt: skip
        return Linear([PreparedWeight(weight=weight, kernels=(kernel,))])

    model = (Layer(linear(3), linear(4)), Layer(linear(3), linear(4)))
    core: Any = SimpleNamespace(ahead=None, runner=ModelRunner.__new__(ModelRunner))
    core.runner.model = model
    assert tune_linears(core, torch.float16) == ["1", "2"]
