"""Formats that merely share a name or a tensor with ours are declined with what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingle.checkpoint.hub import resolve_model
from ingle.errors import CheckpointError, PluginError
from ingle.plugin import WeightFormat
from ingle.registry.choose import choose_weight_format, unread
from ingle.registry.loader import load_plugins
from ingle.testing.foreign import FOREIGN_CHECKPOINTS
from ingle_quant_awq.format import AwqFormat
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_gptq.format import GptqFormat

OURS = ("dense", "awq", "gptq", "exl2")
FOREIGN = [kind for kind in FOREIGN_CHECKPOINTS if kind.split()[0] not in OURS]
METHODS = {
    "float-quantized": "compressed-tensors",
    "int-quantized": "compressed-tensors",
    "nvfp4": "modelopt",
}
VARIETIES = {
    "float-quantized": "format 'float-quantized'",
    "int-quantized": "format 'int-quantized'",
    "nvfp4": "quant_algo 'NVFP4'",
    "fp8": "fmt 'e4m3'",
}
PACKED = {
    "exl3": "trellis (I16)",
    "fp8": "weight (F8_E4M3)",
    "bitsandbytes": "weight (U8)",
    "hqq": "W_q (U8)",
    "aqlm": "codes (I16)",
    "nvfp4": "weight_scale (F8_E4M3)",
    "mxfp4": "gate_up_proj_blocks (U8)",
    "vptq": "indices (I32)",
    "quip": "Qidxs (I64)",
    "spqr": "dense_weights (I64)",
    "torchao": "weight_qdata (I8)",
}
FORMATS: tuple[WeightFormat, ...] = (AwqFormat(), GptqFormat(), Exl2Format())


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("ours", FORMATS, ids=lambda one: one.name)
def test_a_foreign_checkpoint_is_not_claimed(ours: WeightFormat, kind: str) -> None:
    assert ours.detect(FOREIGN_CHECKPOINTS[kind]) is None


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if not kind.endswith("unnamed")])
def test_a_foreign_checkpoint_is_declined_by_its_method_and_kind(kind: str, tmp_path: Path) -> None:
    registry = load_plugins(cache_folder=tmp_path)
    message = str(unread(registry, FOREIGN_CHECKPOINTS[kind]))
    assert f"quant_method {METHODS.get(kind, kind)!r}" in message
    assert VARIETIES.get(kind, "") in message
    assert PACKED.get(kind, "") in message


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if kind.endswith("unnamed")])
def test_a_foreign_checkpoint_without_a_config_is_declined_by_its_tensors(
    kind: str, tmp_path: Path
) -> None:
    registry = load_plugins(cache_folder=tmp_path)
    with pytest.raises(PluginError, match="No plugin reads") as caught:
        choose_weight_format(registry, FOREIGN_CHECKPOINTS[kind], "auto")
    assert PACKED[kind.split()[0]].split()[0] in str(caught.value)


def test_a_gguf_file_is_declined_as_one(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(CheckpointError, match=r"is a file in GGUF, llama\.cpp's format"):
        resolve_model(str(file))


def test_another_file_is_declined_for_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(8))
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        resolve_model(str(file))
