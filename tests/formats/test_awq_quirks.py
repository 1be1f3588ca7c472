"""What AWQ files in the wild get wrong, and what only looks like AWQ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingle.errors import CheckpointError
from ingle.plugin.affine_packing import pack_bits
from ingle_quant_awq.format import AwqFormat
from ingle_quant_awq.packing import INTERLEAVE, transpose_gemm, unpack_columns
from ingle_quant_gptq.format import GptqFormat

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "awq_gptq"
INDEX = {case["name"]: case for case in json.loads((VECTORS / "index.json").read_text())["cases"]}
GEMM = INDEX["awq_gemm_g32"]


def read(folder: Any, case: dict[str, Any]) -> torch.Tensor:
    return folder.load(folder.open(AwqFormat()), case["modules"][0]).dequantize()


def expected(case: dict[str, Any]) -> torch.Tensor:
    return load_file(VECTORS / case["file"])[case["modules"][0]["weight_key"]]


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"quant_method": "AWQ", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        {"w_bit": 4, "q_group_size": 32, "zero_point": True},
        {"quant_method": "awq_marlin", "bits": 4, "group_size": 32},
        {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True},
        {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemv"},
        {"quant_method": "awq", "modules_to_not_convert": "not even a list"},
        {"quant_method": "awq", "modules_to_not_convert": ["gate", "q_proj"]},
    ],
)
def test_the_tensors_are_believed_over_any_config(
    config: dict[str, Any] | None, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(load_file(VECTORS / GEMM["file"]), config)
    assert GptqFormat().detect(folder.info) is None
    assert torch.equal(read(folder, GEMM), expected(GEMM))


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_a_config_beside_config_json_is_read(name: str, write_folder: Callable[..., Any]) -> None:
    case = INDEX["awq_gemm_old_quant_config_json"]
    stated = case["extra_files"]["quant_config.json"]
    folder = write_folder(load_file(VECTORS / case["file"]), None, {name: stated})
    detection = AwqFormat().detect(folder.info)
    assert detection is not None
    assert torch.equal(read(folder, case), expected(case))


@pytest.mark.parametrize(
    "method", ["compressed-tensors", "bitsandbytes", "fp8", "hqq", "quark", "exl2", "vptq"]
)
def test_another_method_is_believed_even_over_tensors(
    method: str, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(load_file(VECTORS / GEMM["file"]), {"quant_method": method})
    assert AwqFormat().detect(folder.info) is None
    assert GptqFormat().detect(folder.info) is None


def test_a_config_that_names_awq_is_preferred_to_a_guess(write_folder: Callable[..., Any]) -> None:
    tensors = load_file(VECTORS / GEMM["file"])
    named = AwqFormat().detect(write_folder(tensors, {"quant_method": "awq"}).info)
    guessed = AwqFormat().detect(write_folder(tensors).info)
    assert named is not None
    assert guessed is not None
    assert named.priority > guessed.priority


def test_a_dense_checkpoint_is_declined(write_folder: Callable[..., Any]) -> None:
    folder = write_folder({"lm_head.weight": torch.zeros(8, 8)}, {"quant_method": "awq"})
    assert AwqFormat().detect(folder.info) is None
    with pytest.raises(CheckpointError, match="no linear is stored in a layout of awq"):
        AwqFormat().open(folder.info)


def test_modules_left_dense_are_not_listed(write_folder: Callable[..., Any]) -> None:
    tensors = load_file(VECTORS / GEMM["file"])
    dense = {
        "model.layers.0.mlp.gate.weight": torch.zeros(4, 8),
        "lm_head.weight": torch.ones(2, 2),
    }
    loader = write_folder({**tensors, **dense}, GEMM["config"]).open(AwqFormat())
    assert list(loader.linears()) == [GEMM["modules"][0]["prefix"]]


def test_an_8_bit_stream_is_not_interleaved_and_auto_rounds_6_bits_are(
    write_folder: Callable[..., Any],
) -> None:
    codes = torch.randint(0, 64, (32, 64), dtype=torch.uint8)
    stored = codes.view(32, 8, 8)[..., sorted(range(8), key=INTERLEAVE.__getitem__)].flatten(1)
    tensors = {
        "m.q_proj.qweight": pack_bits(stored, 6),
        "m.q_proj.qzeros": pack_bits(torch.full((1, 64), 32, dtype=torch.uint8), 6),
        "m.q_proj.scales": torch.ones(1, 64, dtype=torch.float16),
    }
    module = {"prefix": "m.q_proj", "in_features": 32, "out_features": 64}
    for config, wanted in (
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 6}, codes),
        ({"quant_method": "awq", "provider": "auto-round", "bits": 6}, codes),
        ({"quant_method": "awq", "meta": {"quantizer": "gptqmodel:7.7.0"}, "bits": 6}, stored),
    ):
        folder = write_folder(tensors, config)
        found = folder.load(folder.open(AwqFormat()), module).dequantize()
        assert torch.equal(found, wanted.T.float() - 32)


def test_an_activations_scales_divide_the_input_of_the_linear_after_it(
    open_case: Callable[..., Any],
) -> None:
    case = INDEX["awq_scaled_activation_gelu"]
    folder = open_case(case)
    loader = folder.open(AwqFormat())
    name = case["modules"][0]["prefix"]
    scales = next(n for n in folder.info.tensor_names if n.endswith(".act.scales"))
    assert scales in loader.tensor_names(name)
    weight = folder.load(loader, case["modules"][0])
    wanted = folder.checkpoint.get(scales).float().reciprocal()
    assert torch.equal(weight.input_scale, wanted)


def test_an_activations_scales_without_a_linear_are_refused(
    write_folder: Callable[..., Any],
) -> None:
    tensors = load_file(VECTORS / GEMM["file"])
    folder = write_folder({**tensors, "model.act.scales": torch.ones(77)}, GEMM["config"])
    assert AwqFormat().detect(folder.info) is not None
    with pytest.raises(CheckpointError, match=r"model\.act\.scales \[77\]"):
        AwqFormat().open(folder.info)


def test_an_input_rotation_is_refused_loudly(write_folder: Callable[..., Any]) -> None:
    tensors = load_file(VECTORS / GEMM["file"])
    name = f"{GEMM['modules'][0]['prefix']}.hadamard_matrix"
    folder = write_folder({**tensors, name: torch.ones(8, 8)}, GEMM["config"])
    with pytest.raises(CheckpointError, match="hadamard_matrix rotates the input"):
        AwqFormat().open(folder.info)


def test_a_shape_that_config_json_does_not_want_is_refused_with_both_shapes(
    open_case: Callable[..., Any],
) -> None:
    folder = open_case(GEMM)
    loader = folder.open(AwqFormat())
    with pytest.raises(CheckpointError) as caught:
        folder.load(loader, GEMM["modules"][0], in_features=640)
    message = str(caught.value)
    assert "640" in message
    assert f"{GEMM['modules'][0]['prefix']}.qweight" in message


def test_turning_squares_of_nibbles_equals_unpacking_and_packing() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (48, 5), dtype=torch.int64, generator=generator)
    words = words.to(torch.int32)
    codes = unpack_columns(words, 4, 40, interleaved=True)
    assert torch.equal(transpose_gemm(words), pack_bits(codes.T, 4))


def test_a_packed_model_stays_as_small_in_memory_as_on_disk(
    round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    weight = torch.randn(512, 1024)
    for group_size in (32, 128):
        packed = round_to_nearest.pack_awq_gemm(weight, group_size)
        folder = write_folder({f"m.{n}": t for n, t in packed.items()}, {"quant_method": "awq"})
        loader = folder.open(AwqFormat())
        loaded = folder.load(loader, {"prefix": "m", "in_features": 1024, "out_features": 512})
        assert loaded.nbytes <= 1.05 * loader.packed_bytes("m")


def test_rounding_to_nearest_survives_the_round_trip(
    round_to_nearest: Any, write_folder: Callable[..., Any]
) -> None:
    weight = torch.randn(64, 256)
    wanted = round_to_nearest.rounded(weight, 4, 64, sym=False)
    packed = round_to_nearest.pack_awq_gemm(weight, 64)
    folder = write_folder({f"m.{n}": t for n, t in packed.items()})
    module = {"prefix": "m", "in_features": 256, "out_features": 64}
    assert torch.equal(folder.load(folder.open(AwqFormat()), module).dequantize(), wanted)


def test_q_k_and_v_are_fused(round_to_nearest: Any, write_folder: Callable[..., Any]) -> None:
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    tensors = {
        f"{name}.{role}": tensor
        for name, size in sizes.items()
        for role, tensor in round_to_nearest.pack_awq_gemm(torch.randn(size, 128), 64).items()
    }
    folder = write_folder(tensors)
    loader = folder.open(AwqFormat())
    parts = [
        folder.load(loader, {"prefix": name, "in_features": 128, "out_features": size})
        for name, size in sizes.items()
    ]
    fused = loader.fuse(parts)
    assert fused is not None
    assert torch.equal(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))
