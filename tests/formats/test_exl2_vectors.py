"""EXL2 vectors made by the peer's own packer, through the seam: detect, open, load, dequantise,
prepare, multiply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingle.checkpoint.safetensors import open_checkpoint
from ingle.plugin import DeviceInfo, KernelUse, LinearSpec
from ingle_quant_exl2.cpu import Exl2CpuKernel, NibbleExl2Weight
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.nibbles import packing_is_known
from ingle_quant_exl2.packing import (
    pack_codes,
    pack_scale_codes,
    unpack_codes,
    unpack_scale_codes,
)
from ingle_quant_exl2.weight import StoredExl2Weight

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "exl2"
INDEX = json.loads((VECTORS / "index.json").read_text())["vectors"]
LINEARS = [case for case in INDEX if case["kind"] == "exl2_linear"]
CONVERTED = [case for case in INDEX if case["kind"] == "converter"]
CHECKPOINTS = [case["file"] for case in INDEX if case["kind"] == "checkpoint"]
OTHERS = [case for case in INDEX if case["kind"] in ("gptq_linear", "exl3_linear")]
CPU = DeviceInfo(type="cpu")


def name_of(case: dict[str, Any]) -> str:
    return str(case["file"]).removesuffix(".safetensors")


@pytest.fixture
def load_case(write_folder: Callable[..., Any]) -> Callable[..., Any]:
    """Loads the one linear of a vector through the seam, with its vector's other tensors."""

    def load(case: dict[str, Any], **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors = load_file(VECTORS / case["file"])
        folder = write_folder({k: v for k, v in tensors.items() if k.startswith("layer.")})
        module = {
            "prefix": "layer",
            "in_features": case["in_features"],
            "out_features": case.get("logical_out_features", case["out_features"]),
        }
        return folder.load(folder.open(Exl2Format()), module, **changes), tensors

    return load


@pytest.mark.parametrize("case", LINEARS + CONVERTED, ids=name_of)
def test_the_weight_equals_the_peers_bit_for_bit(
    case: dict[str, Any], load_case: Callable[..., Any]
) -> None:
    weight, tensors = load_case(case)
    found = weight.dequantize()
    assert found.dtype == torch.float16
    assert torch.equal(found, tensors["expected.W"].half())


@pytest.mark.parametrize("case", LINEARS, ids=name_of)
def test_groups_are_the_ones_the_vector_was_made_with(
    case: dict[str, Any], load_case: Callable[..., Any]
) -> None:
    weight, _ = load_case(case)
    found = [(section.bits, section.rows) for section in weight.layout.sections]
    assert found == [(section["bits"], section["rows"]) for section in case["sections"]]
    assert len(weight.layout.groups) == case["groups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LINEARS, ids=name_of)
def test_the_product_is_the_peers_exact_one(
    case: dict[str, Any], dtype: torch.dtype, load_case: Callable[..., Any]
) -> None:
    weight, tensors = load_case(case, dtype=dtype)
    kernel = Exl2CpuKernel()
    assert kernel.supports(weight, KernelUse(device=CPU, dtype=dtype, rows=range(1, 17)))
    prepared = kernel.prepare(weight)
    x = tensors["x"].to(dtype)
    rows = x if prepared.input_order is None else x[:, prepared.input_order]
    y = kernel.matmul(rows, prepared).double()
    bias = tensors.get("layer.bias")
    if bias is not None:
        y = y + bias.double()
    wanted = tensors["expected.y"].double()
    bound = Exl2Format.max_relative_error[str(dtype).removeprefix("torch.")]
    assert float((y - wanted).norm() / wanted.norm()) < bound


def test_a_padded_head_has_100_outputs_of_which_128_are_stored(
    load_case: Callable[..., Any],
) -> None:
    case = next(case for case in LINEARS if case["file"].startswith("lm_head_pad"))
    weight, _ = load_case(case)
    assert (weight.out_features, weight.stored_out_features) == (100, 128)
    assert weight.dequantize()[100:].count_nonzero() == 0


def test_the_identity_order_is_no_order(load_case: Callable[..., Any]) -> None:
    plain = next(case for case in LINEARS if case["perm"] == "identity")
    mixed = next(case for case in LINEARS if case["perm"] == "random")
    assert load_case(plain)[0].input_order is None
    order = load_case(mixed)[0].input_order
    assert sorted(order.tolist()) == list(range(mixed["in_features"]))


@pytest.mark.parametrize("case", LINEARS + CONVERTED, ids=name_of)
def test_packing_the_codes_again_gives_the_same_file(
    case: dict[str, Any], load_case: Callable[..., Any]
) -> None:
    weight, tensors = load_case(case)
    words = [
        pack_codes(weight.codes(section, 0, weight.stored_out_features), section.bits)
        for section in weight.layout.sections
    ]
    assert torch.equal(torch.cat(words), tensors["layer.q_weight"])
    scales = unpack_scale_codes(tensors["layer.q_scale"])
    assert torch.equal(pack_scale_codes(scales), tensors["layer.q_scale"])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_a_little_endian_bit_stream_down_each_column(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (96, 8), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    for column in range(8):
        stream = sum(int(code) << (bits * row) for row, code in enumerate(codes[:, column]))
        words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(96 * bits // 32)]
        assert [int(word) & 0xFFFFFFFF for word in packed[:, column]] == words
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("case", LINEARS + CONVERTED, ids=name_of)
def test_the_prepared_layout_dequantises_to_the_same_weight(
    case: dict[str, Any], load_case: Callable[..., Any]
) -> None:
    weight, _ = load_case(case, dtype=torch.bfloat16)
    assert isinstance(weight, StoredExl2Weight)
    wanted = weight.dequantize()
    prepared = Exl2CpuKernel().prepare(weight)
    assert isinstance(prepared, NibbleExl2Weight) == packing_is_known()
    assert torch.equal(prepared.dequantize(), wanted)
    copied = prepared.with_tensors({k: v.clone() for k, v in prepared.tensors().items()})
    assert torch.equal(copied.dequantize(), wanted)


@pytest.mark.parametrize("case", OTHERS, ids=name_of)
@pytest.mark.parametrize("method", [None, "gptq", "exl3"])
def test_linears_of_other_formats_are_declined(
    case: dict[str, Any], method: str | None, write_folder: Callable[..., Any]
) -> None:
    tensors = load_file(VECTORS / case["file"])
    stored = {name: tensor for name, tensor in tensors.items() if name.startswith("layer.")}
    folder = write_folder(stored, {"quant_method": method} if method else None)
    assert Exl2Format().detect(folder.info) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_linear_of_a_checkpoint_is_the_expected_dense_one(
    name: str, dtype: torch.dtype
) -> None:
    with open_checkpoint(VECTORS / name) as checkpoint:
        info = checkpoint.info()
        detection = Exl2Format().detect(info)
        assert detection is not None
        assert "config.json says exl2" in detection.reason
        loader = Exl2Format().open(info)
        dense = load_file(VECTORS / name / "expected" / "dense.safetensors")
        seen = set()
        for linear in loader.linears():
            wanted = dense[f"{linear}.weight"]
            out_features, in_features = wanted.shape
            spec = LinearSpec(
                name=linear,
                in_features=in_features,
                out_features=out_features,
                dtype=dtype,
                device=CPU,
            )
            weight = Exl2CpuKernel().prepare(loader.load_linear(spec, checkpoint))
            assert torch.equal(weight.dequantize()[:out_features], wanted)
            seen.update(loader.tensor_names(linear))
        assert len(loader.linears()) == sum(".layers." in n and "_proj" in n for n in dense) + 1
        stored = {tensor for tensor in info.tensor_names if ".q_" in tensor}
        assert seen == {tensor for tensor in stored if "norm" not in tensor}
