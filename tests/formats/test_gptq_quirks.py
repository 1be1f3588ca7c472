"""What GPTQ files in the wild get wrong, and what only looks like GPTQ."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingle.errors import CheckpointError
from ingle.plugin import AffineWeight
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "awq_gptq"
INDEX = {case["name"]: case for case in json.loads((VECTORS / "index.json").read_text())["cases"]}
SYMMETRIC = INDEX["gptq_v1_b4_g128_sym_gar"]
ACT_ORDER = INDEX["gptq_v1_b4_g32_sym_descact"]
LEGACY_3_BIT = INDEX["gptq_legacy_gptqmodel_b3_v1_sym"]


def tensors_of(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(VECTORS / case["file"])


def load(folder: Any, case: dict[str, Any]) -> AffineWeight:
    weight = folder.load(folder.open(GptqFormat()), case["modules"][0])
    assert isinstance(weight, AffineWeight)
    return weight


def expected(case: dict[str, Any]) -> torch.Tensor:
    return tensors_of(case)[case["modules"][0]["weight_key"]]


def without(case: dict[str, Any], role: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors_of(case).items() if not name.endswith(f".{role}")}


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"bits": 4, "group_size": 128, "desc_act": False},
        {"quant_method": "GPTQ", "bits": 8, "group_size": 32, "desc_act": True},
        {"quant_method": "gptq_marlin", "checkpoint_format": "gptq_marlin", "wbits": 4},
        {"quant_method": "gptq", "checkpoint_format": "marlin", "is_marlin_format": True},
        {"quant_method": "awq", "bits": 4, "sym": True},
        {"quant_method": "gptq", "bits": 4, "dynamic": None, "meta": {"quantizer": "optimum:1"}},
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "sym": True},
        {"quant_method": "gptq", "modules_in_block_to_quantize": [["mlp.gate_up_proj"]]},
    ],
)
def test_the_tensors_are_believed_over_any_config(
    config: dict[str, Any] | None, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(tensors_of(SYMMETRIC), config)
    assert AwqFormat().detect(folder.info) is None
    assert torch.equal(load(folder, SYMMETRIC).dequantize(), expected(SYMMETRIC))


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_a_config_beside_config_json_is_read(name: str, write_folder: Callable[..., Any]) -> None:
    case = INDEX["gptq_v2_b4_g64_asym"]
    folder = write_folder(tensors_of(case), None, {name: case["config"]})
    assert torch.equal(load(folder, case).dequantize(), expected(case))


def test_bitblas_files_are_declined(open_case: Callable[..., Any]) -> None:
    folder = open_case(INDEX["info_bitblas_b4_g128_sym"])
    assert GptqFormat().detect(folder.info) is None
    assert AwqFormat().detect(folder.info) is None
    with pytest.raises(CheckpointError, match="layout bitblas"):
        GptqFormat().open(folder.info)


def test_a_group_index_in_sequence_leaves_the_inputs_alone(open_case: Callable[..., Any]) -> None:
    assert load(open_case(SYMMETRIC), SYMMETRIC).input_order is None


def test_act_order_sorts_codes_by_group_and_keeps_groups_equal(
    open_case: Callable[..., Any],
) -> None:
    weight = load(open_case(ACT_ORDER), ACT_ORDER)
    assert weight.input_order is not None
    assert weight.group_offsets is None
    assert weight.group_size == 32
    g_idx = tensors_of(ACT_ORDER)[f"{ACT_ORDER['modules'][0]['prefix']}.g_idx"]
    assert torch.equal(g_idx[weight.input_order].long(), weight.group_ids())


def test_a_group_index_with_groups_of_unequal_length_is_followed(
    write_folder: Callable[..., Any],
) -> None:
    tensors = tensors_of(SYMMETRIC)
    prefix = SYMMETRIC["modules"][0]["prefix"]
    g_idx = (torch.rand(256, generator=torch.Generator().manual_seed(0)) < 0.3).to(torch.int32)
    folder = write_folder({**tensors, f"{prefix}.g_idx": g_idx}, SYMMETRIC["config"])
    weight = load(folder, SYMMETRIC)
    codes = torch.empty(64, 256)
    assert weight.input_order is not None
    codes[:, weight.input_order] = weight.unpacked_codes().float()
    scales = tensors[f"{prefix}.scales"].float()
    assert torch.equal(weight.dequantize(), (codes - 8) * scales[g_idx.long()].T)


@pytest.mark.parametrize("groups", [(0, 2), (-1, 1)])
def test_a_group_index_outside_the_groups_is_refused(
    groups: tuple[int, int], write_folder: Callable[..., Any]
) -> None:
    prefix = SYMMETRIC["modules"][0]["prefix"]
    g_idx = torch.tensor(groups, dtype=torch.int32).repeat_interleave(128)
    folder = write_folder({**tensors_of(SYMMETRIC), f"{prefix}.g_idx": g_idx})
    with pytest.raises(CheckpointError, match=f"g_idx names groups {groups[0]} to {groups[1]}"):
        load(folder, SYMMETRIC)


def test_without_a_group_index_inputs_are_in_sequence(write_folder: Callable[..., Any]) -> None:
    folder = write_folder(without(SYMMETRIC, "g_idx"), SYMMETRIC["config"])
    assert torch.equal(load(folder, SYMMETRIC).dequantize(), expected(SYMMETRIC))


def test_without_a_group_index_an_odd_number_of_inputs_is_the_models(
    write_folder: Callable[..., Any],
) -> None:
    case = INDEX["gptq_v1_b4_g32_sym_odd_shapes"]
    folder = write_folder(without(case, "g_idx"), case["config"])
    assert dict(folder.open(GptqFormat()).linears()) == {case["modules"][0]["prefix"]: (36, 104)}
    assert torch.equal(load(folder, case).dequantize(), expected(case))
    with pytest.raises(CheckpointError, match=r"wants \[36, 96\]"):
        folder.load(folder.open(GptqFormat()), case["modules"][0], in_features=96)


def test_without_zeros_they_are_in_the_middle(write_folder: Callable[..., Any]) -> None:
    folder = write_folder(without(SYMMETRIC, "qzeros"), SYMMETRIC["config"])
    assert torch.equal(load(folder, SYMMETRIC).dequantize(), expected(SYMMETRIC))


def test_symmetric_zeros_take_no_memory(open_case: Callable[..., Any]) -> None:
    assert load(open_case(SYMMETRIC), SYMMETRIC).zeros is None


@pytest.mark.parametrize("sym", [False, None])
def test_zeros_are_read_when_the_config_does_not_say_symmetric(
    sym: bool | None, write_folder: Callable[..., Any]
) -> None:
    case = INDEX["gptq_v1_b4_g64_asym_zero0_borrow"]
    config = {key: value for key, value in case["config"].items() if key != "sym"}
    folder = write_folder(tensors_of(case), config if sym is None else {**config, "sym": sym})
    assert torch.equal(load(folder, case).dequantize(), expected(case))


@pytest.mark.parametrize("sym", [True, None])
def test_swapped_constants_of_old_3_bit_zeros_are_recognised_by_their_trace(
    sym: bool | None, write_folder: Callable[..., Any]
) -> None:
    config = {k: v for k, v in LEGACY_3_BIT["config"].items() if k not in ("meta", "sym")}
    folder = write_folder(tensors_of(LEGACY_3_BIT), {**config, **({"sym": sym} if sym else {})})
    assert torch.equal(load(folder, LEGACY_3_BIT).dequantize(), expected(LEGACY_3_BIT))


def test_old_3_bit_zeros_that_are_not_symmetric_are_recognised_by_their_writer(
    write_folder: Callable[..., Any],
) -> None:
    for version, same in (("6.0.1", True), ("7.0.0", False)):
        meta = {"quantizer": [f"gptqmodel:{version}"]}
        config = {**LEGACY_3_BIT["config"], "sym": False, "meta": meta}
        folder = write_folder(tensors_of(LEGACY_3_BIT), config)
        found = load(folder, LEGACY_3_BIT).dequantize()
        assert torch.equal(found, expected(LEGACY_3_BIT)) is same


def test_zeros_that_may_be_lost_are_warned_about_once(
    open_case: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    case = INDEX["info_autogptq_b4_asym_true_zero0_corrupt"]
    folder = open_case(case)
    loader = folder.open(GptqFormat())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert folder.load(loader, case["modules"][0]).dequantize().isfinite().all()
    assert [r.getMessage().count("may have lost zeros") for r in caplog.records] == [1]


def test_an_exact_writer_is_not_suspected(
    open_case: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    case = INDEX["gptq_v1_b4_g64_asym_zero0_borrow"]
    load(open_case(case), case)
    assert caplog.records == []


def test_modules_of_different_width_are_listed_and_not_fused(
    open_case: Callable[..., Any],
) -> None:
    case = INDEX["gptq_dynamic_mixed_lm_head"]
    folder = open_case(case)
    loader = folder.open(GptqFormat())
    assert "lm_head" in loader.linears()
    assert "model.layers.0.self_attn.v_proj" not in loader.linears()
    q, k = (m for m in case["modules"] if m["prefix"].startswith("model.layers.0")
            and m["quantized"])  # fmt: skip
    assert loader.fuse([folder.load(loader, q), folder.load(loader, k)]) is None


def test_act_order_is_fused_only_when_the_orders_are_the_same(
    round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    tensors = {}
    for name, shuffled in (("q", True), ("k", True), ("v", False)):
        dense, places = torch.randn(64, 128), order if shuffled else None
        packed = round_to_nearest.pack_gptq(dense, 4, 32, sym=True, order=places)
        tensors |= {f"{name}.{role}": tensor for role, tensor in packed.items()}
    folder = write_folder(tensors)
    loader = folder.open(GptqFormat())
    q, k, v = (
        folder.load(loader, {"prefix": name, "in_features": 128, "out_features": 64})
        for name in "qkv"
    )
    fused = loader.fuse([q, k])
    assert fused is not None
    assert torch.equal(fused.dequantize(), torch.cat([q.dequantize(), k.dequantize()]))
    assert loader.fuse([q, k, v]) is None


def test_per_module_options_follow_the_first_pattern_from_the_start_of_the_name(
    round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    packed = round_to_nearest.pack_gptq(torch.randn(64, 192), 4, 64, sym=True)
    packed["qzeros"] = torch.full_like(packed["qzeros"], -0x77777778)
    tensors = {f"a.b.{role}": tensor for role, tensor in packed.items()}
    module = {"prefix": "a.b", "in_features": 192, "out_features": 64}
    for dynamic, symmetric in (
        ({r"+:a\.b": {"sym": True}, "a.*": {"sym": False}}, True),
        ({r"b": {"sym": False}}, True),
        ({r"a\.b": {"sym": False}}, False),
        ({r"-:x": {}, r".*\.b$": {"sym": False}}, False),
    ):
        folder = write_folder(tensors, {"quant_method": "gptq", "sym": True, "dynamic": dynamic})
        weight = folder.load(folder.open(GptqFormat()), module)
        assert (weight.zeros is None) is symmetric


def test_auto_rounds_options_go_by_name_then_suffix_then_pattern(
    round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    packed = round_to_nearest.pack_gptq(torch.randn(64, 192), 4, 64, sym=True)
    tensors = {f"a.b.{role}": t for role, t in packed.items() if role != "g_idx"}
    module = {"prefix": "a.b", "in_features": 192, "out_features": 64}
    config = {"quant_method": "intel/auto-round", "bits": 4, "sym": True}
    for extra, symmetric in (
        ({"a.*": {"sym": True}, ".b": {"sym": True}, "a.b": {"sym": False}}, False),
        ({"a.*": {"sym": True}, ".b": {"sym": False}}, False),
        ({"^b": {"sym": False}}, True),
        ({"[ab].b": {"sym": False}}, False),
    ):
        raw = {**config, "packing_format": "auto_round", "extra_config": extra}
        folder = write_folder(
            {**tensors, "a.b.qzeros": torch.full_like(packed["qzeros"], -0x77777778)}, raw
        )
        weight = folder.load(folder.open(GptqFormat()), module)
        assert weight.zeros is None
        wrong_label = {**config, "extra_config": extra}
        folder = write_folder(
            {**tensors, "a.b.qzeros": torch.full_like(packed["qzeros"], -0x77777778)}, wrong_label
        )
        weight = folder.load(folder.open(GptqFormat()), module)
        assert (weight.zeros is None) is symmetric


def test_a_pattern_that_is_no_regular_expression_is_refused(
    write_folder: Callable[..., Any],
) -> None:
    config = {"quant_method": "gptq", "dynamic": {"(": {}}}
    folder = write_folder(tensors_of(SYMMETRIC), config)
    with pytest.raises(CheckpointError, match="not a regular expression"):
        GptqFormat().open(folder.info)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("sym", [False, True])
def test_rounding_to_nearest_survives_the_round_trip(
    bits: int, sym: bool, round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    weight = torch.randn(64, 256)
    wanted = round_to_nearest.rounded(weight, bits, 64, sym)
    packed = round_to_nearest.pack_gptq(weight, bits, 64, sym)
    folder = write_folder({f"m.{n}": t for n, t in packed.items()}, {"bits": bits, "sym": sym})
    module = {"prefix": "m", "in_features": 256, "out_features": 64}
    assert torch.equal(folder.load(folder.open(GptqFormat()), module).dequantize(), wanted)


@pytest.mark.parametrize(("bits", "sym"), [(2, True), (4, False), (4, True), (8, False)])
@pytest.mark.parametrize("act_order", [False, True])
def test_a_packed_model_stays_as_small_in_memory_as_on_disk(
    bits: int, sym: bool, act_order: bool, round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    packed = round_to_nearest.pack_gptq(torch.randn(1024, 1024), bits, 64, sym)
    if act_order:
        packed["g_idx"] = packed["g_idx"].flip(0).contiguous()
    folder = write_folder({f"m.{n}": t for n, t in packed.items()}, {"bits": bits, "sym": sym})
    loader = folder.open(GptqFormat())
    loaded = folder.load(loader, {"prefix": "m", "in_features": 1024, "out_features": 1024})
    assert loaded.nbytes <= 1.05 * loader.packed_bytes("m")
