"""Quantising one matrix to EXL2, held to what the peer's algorithm made of the same input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.making.adaptive import Job, Quantised, from_tensors, quantise, search_scales
from ingle_quant_exl2.making.options import BitPlan, stored_bits

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "exl2"
INDEX = json.loads((VECTORS / "index.json").read_text())["vectors"]
CASES = [case for case in INDEX if case["kind"] == "converter"]


def upper_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """By the definition, in float64: U with U.T @ U the inverse of the damped Hessian."""
    damped = hessian.double() + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()


def relative_error(found: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """sqrt(tr(E H E') / tr(W H W')) of [N, K]."""
    e, w, h = (found - weight).double(), weight.double(), hessian.double()
    return float(((e @ h * e).sum() / (w @ h * w).sum()).sqrt())


@pytest.fixture(params=CASES, ids=lambda case: case["file"])
def case(request: pytest.FixtureRequest) -> SimpleNamespace:
    entry = request.param
    tensors = load_file(VECTORS / entry["file"])
    parts = zip(entry["bits"], entry["bits_prop"], strict=True)
    plan = BitPlan(tuple((b, p, entry["group_size"][str(b)]) for b, p in parts))
    weight, hessian = tensors["W"].float(), tensors["H"]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return SimpleNamespace(
        entry=entry, tensors=tensors, plan=plan, weight=weight, hessian=hessian, order=order
    )


def made(case: SimpleNamespace, feed_errors: bool = True) -> Quantised:
    damped = case.hessian[case.order][:, case.order]
    factor = upper_factor(damped, case.entry["percdamp"]) if feed_errors else None
    job = Job(weight=case.weight.T[case.order], layout=case.plan.layout(len(case.order)))
    return quantise([job], factor)[0]


def in_place(case: SimpleNamespace, quantised: Quantised) -> torch.Tensor:
    return quantised.dequantize()[torch.argsort(case.order)].T


def test_the_peers_layout_and_order_come_out(case: SimpleNamespace) -> None:
    tensors = made(case).tensors(case.order)
    for name in ("q_groups", "q_invperm"):
        assert torch.equal(tensors[name], case.tensors[f"layer.{name}"])


def test_nearly_every_code_is_the_peers(case: SimpleNamespace) -> None:
    quantised = made(case)
    stored = {name.removeprefix("layer."): t for name, t in case.tensors.items()}
    theirs = from_tensors(quantised.layout, stored)
    assert (quantised.codes == theirs.codes).float().mean() >= 0.97
    assert (quantised.scale_codes == theirs.scale_codes).float().mean() >= 0.97


def test_the_output_error_is_the_peers_within_two_per_cent(case: SimpleNamespace) -> None:
    error = relative_error(in_place(case, made(case)), case.weight, case.hessian)
    assert error <= 1.02 * case.entry["rel_err_gptq"]


def test_rounding_to_nearest_is_the_peers_too_and_worse(case: SimpleNamespace) -> None:
    error = relative_error(in_place(case, made(case, False)), case.weight, case.hessian)
    assert error == pytest.approx(case.entry["rel_err_rtn_same_layout"], rel=0.02)
    assert error > 1.1 * case.entry["rel_err_gptq"]


def test_what_was_packed_reads_back_as_what_was_decided(case: SimpleNamespace) -> None:
    quantised = made(case)
    tensors = quantised.tensors(case.order)
    pairs = tensors["q_groups"].tolist()
    layout = parse_layout("x", pairs, len(tensors["q_weight"]), len(case.order))
    read = from_tensors(layout, tensors)
    assert torch.equal(read.codes, quantised.codes)
    assert torch.equal(read.dequantize(), quantised.dequantize())


def test_matrices_side_by_side_come_out_as_each_alone(case: SimpleNamespace) -> None:
    damped = case.hessian[case.order][:, case.order]
    factor = upper_factor(damped, 0.12)
    size = len(case.order)
    rows = case.weight.T[case.order]
    plans = [case.plan, BitPlan.parse("4 g128"), BitPlan.parse("8@5/32+3 g64")]
    jobs = [Job(weight=rows * (1 + i), layout=p.layout(size)) for i, p in enumerate(plans)]
    together = quantise(jobs, factor)
    for job, found in zip(jobs, together, strict=True):
        alone = quantise([job], factor)[0]
        assert (found.codes == alone.codes).float().mean() > 0.995
        assert torch.allclose(found.dequantize(), alone.dequantize(), atol=0.5 * job.weight.std())


def test_zero_columns_stay_zero() -> None:
    weight = torch.randn(64, 32)
    weight[:, 8:] = 0
    quantised = quantise([Job(weight=weight, layout=BitPlan.parse("3 g32").layout(64))], None)[0]
    assert torch.equal(quantised.dequantize()[:, 8:], torch.zeros(64, 24))
    assert set(quantised.codes[:, 8:].unique().tolist()) == {4}
    assert set(quantised.scale_codes[:, 8:].unique().tolist()) == {0}


def test_a_group_of_zeros_has_no_scale_and_no_error() -> None:
    quantised = quantise(
        [Job(weight=torch.zeros(32, 8), layout=BitPlan.parse("4 g32").layout(32))], None
    )[0]
    assert not quantised.dequantize().any()


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_a_coarse_search_of_scales_costs_next_to_nothing(bits: int) -> None:
    torch.manual_seed(bits)
    rows = torch.randn(64, 96)
    layout = BitPlan.parse(f"{bits} g64").layout(64)
    errors = [
        float((quantise([Job(weight=rows, layout=layout)], None, s)[0].dequantize() - rows).norm())
        for s in (1, 6)
    ]
    assert errors[1] <= 1.01 * errors[0]


def test_scales_are_searched_as_the_formula_says() -> None:
    torch.manual_seed(3)
    rows = torch.randn(32, 8)
    codes, largest = search_scales(rows, 4)
    base = rows.abs().amax(0) / 7.5
    steps = (16 * (base / base.max()).sqrt()).round()
    assert torch.equal(codes.float() + 1, steps)

    def cost(factor: float) -> float:
        scale = (steps / 16) ** 2 * base.max() * factor
        error = (rows / scale).round().clamp(-8, 7) * scale - rows
        return float((error.abs() ** 3.5).sum())

    found = float(largest) / float(base.max())
    assert cost(found) <= min(cost(0.7 + 0.5 * i / 96) for i in range(97)) * 1.001


def test_the_stored_bits_are_those_of_the_tensors() -> None:
    plan = BitPlan.parse("8@5/32+6@10+5 g128")
    layout = plan.layout(576)
    quantised = quantise([Job(weight=torch.randn(576, 32), layout=layout)], None)[0]
    tensors = quantised.tensors(torch.arange(576))
    size = 8 * sum(t.numel() * t.element_size() for t in tensors.values())
    assert stored_bits(layout, 32) == size


def test_a_plan_is_read_and_its_last_group_may_be_short() -> None:
    layout = BitPlan.parse("8@5/32+4@10/32+3 g64").layout(160)
    assert [(g.bits, g.rows, g.word) for g in layout.groups] == [
        (8, 32, 0),
        (4, 32, 8),
        (3, 64, 12),
        (3, 32, 18),
    ]
