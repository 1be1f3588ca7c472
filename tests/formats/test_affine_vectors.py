"""Every AWQ, GPTQ and AutoRound vector through the seam: detect, open, load, multiply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingle.plugin import WeightFormat
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "awq_gptq"
OLDEST = "info_legacy_float_zeros_b4"
"""For information in the index, as it is hardly ever met; but it can be read."""
CASES = [
    case
    for case in json.loads((VECTORS / "index.json").read_text())["cases"]
    if case["enforce"] or case["name"] == OLDEST
]
MODULES = [
    pytest.param(case, module, id=f"{case['name']}:{module['prefix']}")
    for case in CASES
    for module in case["modules"]
    if module.get("quantized", True)
]


def formats_of(case: dict[str, Any]) -> tuple[WeightFormat, WeightFormat]:
    """The format that must read a case, and the one that must not."""
    awq, gptq = AwqFormat(), GptqFormat()
    return (awq, gptq) if "awq" in case["format"] else (gptq, awq)


def test_no_enforced_case_is_left_out() -> None:
    assert sum(case["enforce"] for case in CASES) == 45


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_only_its_own_format_claims_a_file_and_lists_exactly_its_packed_modules(
    case: dict[str, Any], open_case: Callable[..., Any]
) -> None:
    own, other = formats_of(case)
    folder = open_case(case)
    assert other.detect(folder.info) is None
    assert dict(folder.open(own).linears()) == {
        m["prefix"]: (m["out_features"], m["in_features"])
        for m in case["modules"]
        if m.get("quantized", True)
    }


@pytest.mark.parametrize(("case", "module"), MODULES)
def test_the_weight_is_the_one_the_writer_packed(
    case: dict[str, Any], module: dict[str, Any], open_case: Callable[..., Any]
) -> None:
    folder = open_case(case)
    weight = folder.load(folder.open(formats_of(case)[0]), module)
    wanted = folder.expected[module["weight_key"]]
    if weight.input_scale is not None:
        wanted = wanted * weight.input_scale
    found = weight.dequantize()
    assert found.dtype == torch.float32
    tolerance = case["tolerance"]
    torch.testing.assert_close(
        found, wanted, rtol=tolerance["weight_rtol"], atol=tolerance["weight_atol"]
    )


@pytest.mark.parametrize(("case", "module"), MODULES)
def test_the_product_is_the_one_the_writer_computed(
    case: dict[str, Any],
    module: dict[str, Any],
    open_case: Callable[..., Any],
    cpu_product: Callable[..., torch.Tensor],
) -> None:
    folder = open_case(case)
    weight = folder.load(folder.open(formats_of(case)[0]), module)
    x = folder.expected[module["x_key"]].float()
    if "pre_activation" in module:
        x = torch.nn.functional.gelu(x)
    bias = torch.zeros(module["out_features"])
    if f"{module['prefix']}.bias" in folder.info.tensor_shapes:
        bias = folder.checkpoint.get(f"{module['prefix']}.bias").float()
    wanted = folder.expected[module["y_key"]].float()
    for y in (x @ weight.dequantize().T, cpu_product(weight, x)):
        assert (y + bias - wanted).abs().max().item() <= case["tolerance"]["y_atol"]
