"""The quantisers against results of GPTQModel 7.7.0 and AutoAWQ 0.2.9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingle.quantize.hessian import Hessian
from ingle_quant_awq.making.grid import Grid, Rounded
from ingle_quant_awq.making.search import clip, search_clip, search_scales
from ingle_quant_gptq.making.options import GptqOptions
from ingle_quant_gptq.making.solve import round_to_nearest, solve

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vectors" / "awq_gptq_algorithms"
CASES = json.loads((FOLDER / "index.json").read_text())["cases"]


def cases(algorithm: str) -> list[Any]:
    return [pytest.param(c, id=c["name"]) for c in CASES if c["algorithm"] == algorithm]


def relative_error(weight: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> float:
    moved = (x @ (weight - wanted).T).square().sum()
    return float(moved / (x @ wanted.T).square().sum())


@pytest.mark.parametrize("case", cases("gptq"))
def test_gptq_is_as_good_as_the_peer_on_its_own_inputs(case: dict[str, Any]) -> None:
    tensors = load_file(FOLDER / case["file"])
    weight, x = tensors["W"].float(), tensors["X"].float()
    params = {key: value for key, value in case["params"].items() if key != "blocksize"}
    hessian = Hessian(weight.shape[1])
    for part in x.split(100):
        hessian.add(part)
    options = GptqOptions(**params)
    solved = solve(weight, hessian.matrix(), options)
    error = relative_error(solved.dequantize(), weight, x)
    assert error <= 1.02 * case["rel_output_error_gptq"]
    assert torch.equal(solved.group_ids, tensors["g_idx"])
    nearest = relative_error(round_to_nearest(weight, options).dequantize(), weight, x)
    assert error < 0.5 * nearest


@pytest.mark.parametrize("case", cases("awq"))
def test_awq_finds_the_scales_and_bounds_that_the_peer_finds(case: dict[str, Any]) -> None:
    tensors, params = load_file(FOLDER / case["file"]), case["params"]
    weight, x = tensors["W"].float(), tensors["X"].float()
    grid = Grid(params["bits"], params["group_size"], not params["zero_point"])

    def loss(weights: Any) -> float:
        return float((x @ (weights[0] - weight).T).square().mean())

    scales = search_scales([weight], x.abs().mean(0), grid, loss, params["duo_scaling"])
    torch.testing.assert_close(scales, tensors["scales"], rtol=1e-4, atol=0)
    bounds = search_clip(weight * scales, x / scales, grid)
    same = (bounds - tensors["clip"]).abs() <= 1e-4 * tensors["clip"]
    assert float(same.float().mean()) > 0.99
    rounded = Rounded.of(clip(weight * scales, bounds, grid), grid)
    groups = grid.grouped(rounded.codes.float()) - rounded.zeros.T.unsqueeze(2)
    stored = (groups * rounded.scales.float().T.unsqueeze(2)).view(weight.shape) / scales
    assert relative_error(stored, weight, x) <= 1.02 * case["rel_output_error_scale_clip"]
