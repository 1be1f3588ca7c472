"""Kernels: chosen by priority, checked once, set aside when they are wrong."""

from __future__ import annotations

import json

import pytest
import torch

from ingle.builtin.dense_linear import DenseTorchKernel, DenseWeight
from ingle.errors import PluginError
from ingle.plugin import KernelUse, LinearWeight
from ingle.registry.kernels import KernelSelector, choose_kernel
from ingle.registry.self_check import check_kernel, rows_to_check

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}


def selector(registry, device) -> KernelSelector:
    return KernelSelector(registry.matmul_kernels(device), registry.self_checks, BOUNDS)


def error_of(prepared, dense: torch.Tensor) -> float:
    x = torch.randn(9, dense.shape[1])
    wanted = x @ dense.t()
    found = prepared.kernel.matmul(x, prepared.weight)
    return float((found - wanted).norm() / wanted.norm())


def test_core_alone_serves_a_dense_weight(site, cpu, use, weight) -> None:
    prepared = selector(site.load(), cpu).prepare(weight, use)
    assert (prepared.kernel.name, prepared.plugin) == ("dense_torch", "dense")


def test_the_highest_priority_that_supports_the_use_is_taken(site, cpu, use, weight) -> None:
    site.install("good")
    registry = site.load()
    kernel, reasons = choose_kernel(registry.matmul_kernels(cpu), weight, use)
    assert kernel.name == "good_kernel"
    assert reasons == ("good_kernel: multiplies everything",)


def test_a_decline_comes_with_its_reason(site, cpu, use, weight) -> None:
    _, reasons = choose_kernel(site.load().matmul_kernels(cpu), weight, use)
    assert any("only bfloat16" in reason for reason in reasons)


def test_a_wrong_kernel_is_set_aside_with_its_measured_error(
    site, reported, cpu, use, weight
) -> None:
    site.install("wrong_kernel", "good")
    registry = site.load()
    dense = weight.dequantize().clone()
    prepared = selector(registry, cpu).prepare(weight, use)
    assert prepared.kernel.name == "good_kernel"
    assert error_of(prepared, dense) < 1e-5
    plugin = reported(registry, "wrong_kernel")
    assert (plugin.status, plugin.stage) == ("failed", "self_check")
    assert "wrong_kernel: wrong by 0.1 (relative)" in plugin.reason
    assert any("wrong by 0.1" in reason for reason in prepared.reasons)


def test_kernels_that_raise_are_set_aside(site, reported, cpu, use, weight) -> None:
    site.install("raising_kernel", "good")
    registry = site.load()
    prepared = selector(registry, cpu).prepare(weight, use)
    assert prepared.kernel.name == "good_kernel"
    lines = [failure.line for failure in reported(registry, "raising_kernel").failures]
    assert lines == [
        "supports: undecided_kernel.supports: KeyError: 'capability'",
        "self_check: raising_kernel: ZeroDivisionError: tile of width 0",
    ]
    assert "tile of width 0" in reported(registry, "raising_kernel").failures[1].traceback


def test_a_weight_that_a_kernel_ruined_is_still_served(site, reported, cpu, use, weight) -> None:
    site.install("ruining_kernel")
    registry = site.load()
    dense = weight.dequantize().clone()
    prepared = selector(registry, cpu).prepare(weight, use)
    assert prepared.kernel.name == "dense_torch"
    assert error_of(prepared, dense) < 1e-5
    assert reported(registry, "ruining_kernel").stage == "self_check"


def test_a_kernel_set_aside_is_not_tried_on_the_next_weight(site, reported, cpu, use) -> None:
    site.install("wrong_kernel", "ruining_kernel", "raising_kernel")
    registry = site.load()
    chosen = selector(registry, cpu)
    for n in (8, 16, 24):
        chosen.prepare(DenseWeight(torch.randn(n, 40)), use)
    last = chosen.prepare(DenseWeight(torch.randn(24, 40)), use)
    assert last.kernel.name == "dense_torch"
    assert len(reported(registry, "wrong_kernel").failures) == 1


def test_strict_plugins_stops_at_a_wrong_kernel(site, cpu, use, weight) -> None:
    site.install("wrong_kernel")
    registry = site.load(strict=True)
    with pytest.raises(PluginError, match=r"wrong_kernel .*self_check.*wrong by 0\.1"):
        selector(registry, cpu).prepare(weight, use)


def test_a_pass_is_remembered_on_disk_and_not_measured_again(
    site, cpu, use, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector(site.load(), cpu).prepare(DenseWeight(torch.randn(24, 40)), use)
    kept = json.loads((site.cache_folder / "self_check.json").read_text())
    assert [key.split(" | ")[0] for key in kept] == ["dense_torch"]

    def refuse(self: LinearWeight) -> torch.Tensor:
        raise AssertionError("measured again")

    monkeypatch.setattr(DenseWeight, "dequantize", refuse)
    again = selector(site.load(), cpu).prepare(DenseWeight(torch.randn(24, 40)), use)
    assert again.kernel.name == "dense_torch"


def test_another_shape_dtype_or_row_range_is_measured_anew(site, cpu, use) -> None:
    registry = site.load()
    chosen = selector(registry, cpu)
    chosen.prepare(DenseWeight(torch.randn(24, 40)), use)
    chosen.prepare(DenseWeight(torch.randn(24, 48)), use)
    chosen.choose(
        DenseWeight(torch.randn(24, 40)),
        KernelUse(device=cpu, dtype=torch.float32, rows=range(101, 999)),
    )
    kept = json.loads((site.cache_folder / "self_check.json").read_text())
    assert len(kept) == 3


def test_a_failure_is_never_remembered(site, cpu, use, weight) -> None:
    site.install("wrong_kernel")
    selector(site.load(), cpu).prepare(weight, use)
    kept = (site.cache_folder / "self_check.json").read_text()
    assert "wrong_kernel" not in kept


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"key": "text"}'])
def test_a_spoilt_cache_file_is_measured_over(site, cpu, use, weight, content) -> None:
    site.cache_folder.mkdir()
    (site.cache_folder / "self_check.json").write_text(content)
    assert selector(site.load(), cpu).prepare(weight, use).kernel.name == "dense_torch"
    json.loads((site.cache_folder / "self_check.json").read_text())


def test_a_cache_folder_that_cannot_be_written_does_no_harm(site, cpu, use, weight) -> None:
    site.cache_folder.write_text("a file where the folder should be")
    assert selector(site.load(), cpu).prepare(weight, use).kernel.name == "dense_torch"


def test_a_kernel_that_passed_once_and_raises_now_is_set_aside_at_warm_up(
    site, reported, cpu, use, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("good")
    selector(site.load(), cpu).prepare(DenseWeight(torch.randn(24, 40)), use)
    registry = site.load()
    good = next(o.item for o in registry.matmul_kernels(cpu) if o.item.name == "good_kernel")

    def refuse(self, *arguments, **options):
        raise MemoryError("out of registers")

    monkeypatch.setattr(type(good), "matmul", refuse)
    prepared = selector(registry, cpu).prepare(DenseWeight(torch.randn(24, 40)), use)
    assert prepared.kernel.name == "dense_torch"
    assert reported(registry, "good").stage == "warm_up"
    assert "out of registers" in reported(registry, "good").reason


def test_another_row_range_of_a_prepared_weight_is_served(site, cpu) -> None:
    chosen = selector(site.load(), cpu)
    few = KernelUse(device=cpu, dtype=torch.bfloat16, rows=range(1, 17))
    many = KernelUse(device=cpu, dtype=torch.bfloat16, rows=range(17, 513))
    prepared = chosen.prepare(DenseWeight(torch.randn(64, 32).bfloat16()), few)
    again = chosen.choose(prepared.weight, many)
    assert again.weight is prepared.weight
    assert again.kernel.name == prepared.kernel.name


def test_a_kernel_wrong_in_one_tile_of_a_large_vocabulary_is_caught(cpu, use) -> None:
    class OneTileWrong(DenseTorchKernel):
        def matmul(self, x, weight, **options):
            y = super().matmul(x, weight, **options)
            y[:, 5056:5088] = 0
            return y

    large = DenseWeight(torch.randn(9000, 8))
    dense = large.dequantize()
    assert check_kernel(DenseTorchKernel(), large, dense, use, 1e-5) is None
    assert check_kernel(OneTileWrong(), large, dense, use, 1e-5) is not None


class OrderedScaledWeight(LinearWeight):
    """A weight [N, K] that wants its input scaled and permuted, kept as kernels see it."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.stored_out_features, self.in_features = dense.shape
        self.out_features = self.stored_out_features
        self.input_scale = torch.rand(self.in_features) + 0.5
        self.input_scale[3] = 0
        self.input_order = torch.randperm(self.in_features)
        dense[:, 3] = 0
        self.dense = dense

    def dequantize(self) -> torch.Tensor:
        return self.dense

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"dense": self.dense}

    def with_tensors(self, tensors):
        return self


def test_the_fallback_undoes_order_and_scale_that_core_has_applied(site, cpu, use) -> None:
    weight = OrderedScaledWeight(torch.randn(24, 40))
    prepared = selector(site.load(), cpu).prepare(weight, use)
    assert prepared.kernel.name == "dequantize"
    assert check_kernel(prepared.kernel, weight, weight.dense, use, 1e-5) is None


def test_check_kernel_says_in_a_line_what_is_wrong(site, cpu, use, weight) -> None:
    site.install("wrong_kernel", "raising_kernel")
    kernels = {o.item.name: o.item for o in site.load().matmul_kernels(cpu)}
    dense = weight.dequantize()
    assert check_kernel(kernels["dense_torch"], weight, dense, use, 1e-5) is None
    wrong = check_kernel(kernels["wrong_kernel"], weight, dense, use, 1e-5)
    assert wrong.startswith("wrong by 0.1 (relative) for 1 rows")
    raising = check_kernel(kernels["raising_kernel"], weight, dense, use, 1e-5)
    assert raising == "ZeroDivisionError: tile of width 0"


@pytest.mark.parametrize(
    ("rows", "checked"),
    [
        (range(1, 17), [1, 16]),
        (range(1, 513), [1, 17]),
        (range(0, 5), [1, 4]),
        (range(1, 2), [1]),
        (range(65, 2049), [65, 81]),
    ],
)
def test_few_row_counts_are_checked_and_all_within_the_use(rows, checked) -> None:
    assert rows_to_check(rows) == checked
