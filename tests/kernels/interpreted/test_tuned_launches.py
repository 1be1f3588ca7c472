"""Every launch that a tuner may choose, in the interpreter: right, and taken by the next load."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_device import CARD
from paged_case import Case, problem
from test_cuda_engine import logits_of, open_core, open_on_card, relative_error
from test_exl2_plugin import LAYOUTS, random_weight
from test_w4_plugin import affine

from ingle.attention.decode_launches import DecodeShape, tiles
from ingle.attention.paged_cuda import PagedCUDAAttention
from ingle.builtin import w4_tuning
from ingle.builtin.affine_cuda_kernel import W4CudaKernel
from ingle.builtin.affine_cuda_weight import W4CudaWeight
from ingle.engine import attention_tuning
from ingle.engine.launch_tuning import tune_launches
from ingle.engine.model_runner import ModelRunner
from ingle.model.decoder import Decoder
from ingle.model.linear import find_linears
from ingle.plugin import DeviceInfo
from ingle_quant_exl2 import tuning as exl2_tuning
from ingle_quant_exl2.cuda import Exl2CudaKernel


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A made-up timer that calls the launch and finds each faster than the one before; what it
    gave."""
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))
    given: list[float] = []

    def seconds(device: DeviceInfo, calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        given.append(1.0 / (1 + len(given)))
        return given[-1]

    for module in (w4_tuning, exl2_tuning, attention_tuning):
        monkeypatch.setattr(module, "launch_seconds", seconds)
    for module in (w4_tuning, exl2_tuning):
        monkeypatch.setattr(module, "num_copies", lambda device, num_bytes: 2)
    return given


def matmul(kernel: Any, weight: Any, x: torch.Tensor) -> torch.Tensor:
    workspace = torch.zeros(kernel.workspace_bytes(weight, x.shape[0]), dtype=torch.uint8)
    return kernel.matmul(x, weight, workspace=workspace)


@pytest.mark.parametrize(("group", "dtype"), [(32, torch.float16), (128, torch.bfloat16)])
def test_every_launch_of_a_4_bit_product_is_measured_and_right(
    timed: list[float], group: int, dtype: torch.dtype
) -> None:
    kernel = W4CudaKernel(CARD)
    weight = kernel.prepare(affine(128, 1024, group))
    assert isinstance(weight, W4CudaWeight)
    number = len(w4_tuning.w4_launches(weight.packed, 128))
    assert "W4Config(block_n=64, splits=2, prefetch=False" in kernel.tune(weight, dtype)
    assert len(timed) == number  # each was compared with the default one's result
    again = W4CudaKernel(CARD).prepare(affine(128, 1024, group))
    assert isinstance(again, W4CudaWeight)
    assert (again.config.block_n, again.config.splits) == (64, 2)
    for rows in (1, 9):  # of more than 8 rows, 64 features become two programs
        x = torch.randn(rows, 1024).to(dtype)
        wanted = x.float() @ weight.dequantize().T
        assert relative_error(matmul(kernel, again, x).float(), wanted) < 4e-3


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_every_launch_of_an_exl2_product_is_measured_and_right(
    timed: list[float], groups: tuple[tuple[int, int], ...]
) -> None:
    kernel = Exl2CudaKernel(CARD)
    weight: Any = kernel.prepare(random_weight(groups, 64, torch.float16))
    choices = exl2_tuning.exl2_launches(weight.packed, 128)
    kernel.tune(weight, torch.float16)
    assert len(timed) == len(choices) > 1
    again: Any = Exl2CudaKernel(CARD).prepare(random_weight(groups, 64, torch.float16))
    assert again.launch == choices[-1]
    assert again.launch.block_n == 32 or weight.launch.block_n == 32
    x = torch.randn(5, weight.in_features).half()
    stored = weight.dequantize()[:, weight.input_order].float()
    assert relative_error(matmul(kernel, again, x).float(), x.float() @ stored.T) < 2e-3


def test_a_launch_that_is_wrong_on_the_card_is_left_out(timed: list[float]) -> None:
    kernel = W4CudaKernel(CARD)
    weight = kernel.prepare(affine(128, 1024, 128))
    assert isinstance(weight, W4CudaWeight)
    default, *others = w4_tuning.w4_launches(weight.packed, 128)
    product = w4_tuning.w4_product(weight.packed, CARD, torch.float16, default)
    assert product.seconds(others[0]) > 0
    product.wanted.mul_(1.1)
    with pytest.raises(ValueError, match=r"wrong by 0\.09"):
        product.seconds(others[0])


@pytest.mark.parametrize("formats", ["auto", "int8", "int4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_every_tile_of_decode_attention_is_right(head_dim: int, formats: str) -> None:
    blocks = itertools.cycle((16, 256))
    for (tokens, warps), block in zip(tiles(head_dim), blocks, strict=False):
        case = Case(head_dim=head_dim, group=3, length=150, block_size=block, formats=formats)
        one = problem(case)
        shape = DecodeShape(
            num_heads=3, num_kv_heads=1, head_dim=head_dim, block_size=block,
            formats=(formats, formats), dtype=torch.float16, has_softcap=False,
        )  # fmt: skip
        wanted = one.reference()
        for config in shape.launches(2, 1):
            if (config.block_tokens, config.num_warps) == (tokens, warps):
                assert relative_error(one.kernel(config), wanted) < case.bound


@pytest.mark.usefixtures("installed_plugins")
def test_an_engine_launches_as_was_measured_and_computes_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, timed: list[float]
) -> None:
    wanted = logits_of(open_core(checkpoint))
    core = open_on_card(checkpoint, monkeypatch, enforce_eager=True, max_num_seqs=4)
    assert not timed  # a start measures nothing
    lines = tune_launches(core, CARD)
    assert len([line for line in lines if line.startswith("w4 ")]) == 4
    attended = [line for line in lines if line.startswith("decode v1 ")]
    assert [line.split()[2] for line in attended] == ["1", "2", "4"]
    number = len(timed)
    again = open_on_card(checkpoint, monkeypatch, enforce_eager=True, max_num_seqs=4)
    assert len(timed) == number
    runner = again.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    backend = runner.model.layers[0].attention.backend
    assert isinstance(backend, PagedCUDAAttention)
    assert set(backend.scratch.launches.measured) == {1, 2, 4}
    weights = [part.weight for one in find_linears(runner.model) for part in one.parts]
    blocks = {weight.config.block_n for weight in weights if isinstance(weight, W4CudaWeight)}
    assert blocks == {64}
    for ours, theirs in zip(logits_of(again), wanted, strict=True):
        assert relative_error(ours, theirs) < 4e-3
