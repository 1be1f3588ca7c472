"""The tuner of 4-bit products, with a timer that is made up: what it picks, keeps and refuses."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.errors import TritonError

from ingle.builtin.affine_cuda_kernel import W4CudaKernel
from ingle.builtin.affine_triton import PackedW4, W4Config, default_w4_config, pack_w4
from ingle.builtin.w4_tuning import TunedLaunches, launches, tune, weight_key
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


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedLaunches:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path))
    return TunedLaunches(CARD)


def test_the_fastest_is_picked_and_what_fails_is_left_out() -> None:
    packed = packed_weight()
    wanted = W4Config(block_n=64, splits=2, prefetch=False)
    tried: list[W4Config] = []

    def seconds(config: W4Config) -> float:
        tried.append(config)
        if config.block_n == 16:
            raise TritonError("out of resources")
        return 1e-6 if config == wanted else 2e-6

    assert tune(packed, 82, seconds) == (wanted, 1e-6)
    assert tried[0] == default_w4_config(packed, 82)
    assert len(set(tried)) == len(tried) > 10


def test_of_equals_the_default_is_kept_and_without_any_it_says_so() -> None:
    packed = packed_weight()
    assert tune(packed, 82, lambda config: 1.0)[0] == default_w4_config(packed, 82)

    def fail(config: W4Config) -> float:
        raise RuntimeError("no card")

    with pytest.raises(RuntimeError, match="128x2048"):
        tune(packed, 82, fail)


@pytest.mark.parametrize("shape", [(64, 128), (128, 2048), (4096, 4096), (28672, 4096)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_launches_are_such_as_the_kernel_takes(shape: tuple[int, int], group: int) -> None:
    packed = packed_weight(64, 128, group)
    words = torch.empty(shape[0] // 16, shape[1] // 128, 2, 32, 8, dtype=torch.int16, device="meta")
    packed = replace(packed, words=words, out_features=shape[0], in_features=shape[1])
    found = list(launches(packed))
    assert found
    for config in found:
        assert shape[0] % config.block_n == 0
        assert config.splits == 1 or shape[1] // 128 >= 4 * config.splits
        assert not (config.prefetch and group < 128)  # it spills


def test_what_was_measured_is_kept_per_card_and_version(
    tuned: TunedLaunches, tmp_path: Path
) -> None:
    packed, config = packed_weight(), W4Config(block_n=16, splits=3, prefetch=False)
    assert tuned.get(packed) is None
    tuned.add(packed, config, 3e-6)
    tuned.add(packed_weight(64), config, 4e-6)
    assert TunedLaunches(CARD).get(packed) == config
    assert tuned.get(packed_weight(group=64)) is None
    assert TunedLaunches(replace(CARD, name="NVIDIA H200")).get(packed) is None
    assert tuned.path.parent == tmp_path / "launches"
    assert tuned.path.name == f"NVIDIA-GeForce-RTX-3090-triton-{triton.__version__}.json"
    entries = json.loads(tuned.path.read_text())
    assert entries[weight_key(packed)] == {**asdict(config), "us": 3.0}
    assert len(entries) == 2
    assert len(list(tuned.path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null"]
    + [
        json.dumps({weight_key(packed_weight()): entry})
        for entry in (
            7,
            {},
            {"block_n": 48, "splits": 1, "prefetch": True, "num_stages": 1},
            {"block_n": 32, "splits": 0, "prefetch": True, "num_stages": 1},
            {"block_n": 32, "splits": 17, "prefetch": True, "num_stages": 1},
            {"block_n": 32, "splits": 1, "prefetch": "yes", "num_stages": 1},
            {"block_n": 32, "splits": 1, "prefetch": True, "num_stages": 9},
        )
    ],
)
def test_a_file_that_says_what_cannot_be_counts_as_nothing(
    tuned: TunedLaunches, content: str
) -> None:
    tuned.path.parent.mkdir()
    tuned.path.write_text(content)
    assert tuned.get(packed_weight()) is None


def test_a_load_reads_what_was_measured_and_measures_nothing(
    tuned: TunedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight: Any = W4CudaKernel(CARD).prepare(affine_weight())
    assert weight.config == default_w4_config(weight.packed, 82)
    wanted = W4Config(block_n=64, splits=2, prefetch=False)
    monkeypatch.setattr(
        "ingle.builtin.affine_cuda_kernel.graph_seconds",
        lambda packed, config: 1e-6 if config == wanted else 2e-6,
    )
    line = W4CudaKernel(CARD).tune(weight)
    assert "128x2048" in line
    assert "1.0 us" in line
    monkeypatch.setattr("ingle.builtin.affine_cuda_kernel.graph_seconds", None)
    again: Any = W4CudaKernel(CARD).prepare(affine_weight())
    assert again.config == wanted
    assert W4CudaKernel(CARD).tune(affine_weight()) == ""


@dataclass(frozen=True)
class Layer:
    first: Linear
    second: Linear


def test_each_kind_of_weight_of_a_model_is_measured_once() -> None:
    numbers = itertools.count(1)
    kernel: Any = SimpleNamespace(name="k", tune=lambda weight: f"{next(numbers)}")

    def linear(n: int) -> Linear:
        weight: Any = SimpleNamespace(
            tensors=lambda: {"w": torch.zeros(n, 2)}, out_features=n,
            input_order=None, input_scale=None, stored_out_features=n, output_rows=None,
        )  # fmt: skip
        return Linear([PreparedWeight(weight=weight, kernels=(kernel,))])

    model = (Layer(linear(3), linear(4)), Layer(linear(3), linear(4)))
    core: Any = SimpleNamespace(ahead=None, runner=ModelRunner.__new__(ModelRunner))
    core.runner.model = model
    assert tune_linears(core) == ["1", "2"]
