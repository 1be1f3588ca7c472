"""``ingle dequantize`` on every vector, as a person runs it: dense weights equal to the peers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingle.cli import main
from ingle.engine import dequantize as engine_dequantize

DATA = Path(__file__).resolve().parents[1] / "data" / "vectors"
AFFINE = json.loads((DATA / "awq_gptq" / "index.json").read_text())["cases"]
CASES = [case for case in AFFINE if case["enforce"]]
EXL2 = [
    case
    for case in json.loads((DATA / "exl2" / "index.json").read_text())["vectors"]
    if case["kind"] in ("exl2_linear", "converter")
]
Run = Callable[..., dict[str, torch.Tensor]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_packed_linear_is_the_one_its_writer_packed(
    case: dict[str, Any], dtype: str, dequantize: Run, tmp_path: Path
) -> None:
    tensors = load_file(DATA / "awq_gptq" / case["file"])
    stored = {n: t for n, t in tensors.items() if not n.startswith("__test__.")}
    config = {"quantization_config": case["config"]} if case["config"] else {}
    files = {"config.json": {"model_type": "llama", **config}, **case["extra_files"]}
    found = dequantize(stored, files, "--dtype", dtype)
    packed = [m for m in case["modules"] if m.get("quantized", True)]
    own = tuple(f"{m['prefix']}." for m in packed)
    copied = {n for n in stored if not n.startswith(own) or n.endswith(".bias")}
    assert set(found) == copied | {f"{m['prefix']}.weight" for m in packed}
    for name in copied:
        assert torch.equal(found[name], stored[name])
    for module in packed:
        weight, wanted = found[f"{module['prefix']}.weight"], tensors[module["weight_key"]]
        if dtype == "float32":
            torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=0)
        else:
            assert torch.equal(weight, wanted.to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "out0" / "config.json").read_text()) == {"model_type": "llama"}
    assert not any((tmp_path / "out0" / name).exists() for name in case["extra_files"])


@pytest.mark.parametrize("case", EXL2, ids=lambda case: case["file"])
def test_an_exl2_linear_is_the_peers_bit_for_bit(
    case: dict[str, Any], dequantize: Run, tmp_path: Path
) -> None:
    tensors = load_file(DATA / "exl2" / case["file"])
    stored = {n: t for n, t in tensors.items() if n.startswith("layer.")}
    found = dequantize(stored, {"config.json": {}}, "--dtype", "float32")
    assert torch.equal(found["layer.weight"], tensors["expected.W"])
    (written,) = (tmp_path / "out0").glob("*.safetensors")
    assert written.stat().st_mode & 0o666 == (tmp_path / "out0").stat().st_mode & 0o666
    assert set(found) - {"layer.weight", "layer.bias"} == set()


@pytest.mark.parametrize("name", ["tiny_llama_exl2", "tiny_qwen3_exl2"])
def test_a_tiny_exl2_model_becomes_the_expected_dense_model(
    name: str, dequantize: Run, tmp_path: Path
) -> None:
    folder = DATA / "exl2" / name
    config = json.loads((folder / "config.json").read_text())
    files = {"config.json": config, "tokenizer_config.json": {"a": 1}}
    found = dequantize(load_file(folder / "output.safetensors"), files, "--dtype", "float16")
    wanted = load_file(folder / "expected" / "dense.safetensors")
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in wanted.items()}
    for tensor in wanted:
        assert torch.equal(found[tensor].float(), wanted[tensor].float()), tensor
    assert (tmp_path / "out0" / "tokenizer_config.json").exists()
    written = json.loads((tmp_path / "out0" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["torch_dtype"] == "float16"
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out0", dtype=torch.float32)
    expected = load_file(folder / "expected" / "logits.safetensors")
    with torch.inference_mode():
        logits = model(expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-4)


def test_a_packed_head_of_a_tied_model_is_not_tied_any_more(
    dequantize: Run, tmp_path: Path, round_to_nearest: Any
) -> None:
    packed = round_to_nearest.pack_gptq(torch.randn(96, 64), 4, 32, True)
    tensors = {f"lm_head.{role}": tensor for role, tensor in packed.items()}
    tensors["model.embed_tokens.weight"] = torch.randn(96, 64)
    files = {"config.json": {"tie_word_embeddings": True, "quantization_config": {"bits": 4}}}
    found = dequantize(tensors, files)
    assert set(found) == {"lm_head.weight", "model.embed_tokens.weight"}
    written = json.loads((tmp_path / "out0" / "config.json").read_text())
    assert written == {"tie_word_embeddings": False}


def test_large_models_are_cut_into_files_with_an_index(
    dequantize: Run, tmp_path: Path, round_to_nearest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_dequantize, "SHARD_BYTES", 20_000)
    weights = {f"model.layers.{i}.mlp.up_proj": torch.randn(64, 64) for i in range(5)}
    tensors = {
        f"{name}.{role}": tensor
        for name, weight in weights.items()
        for role, tensor in round_to_nearest.pack_awq_gemm(weight, 32).items()
    }
    with pytest.raises(FileNotFoundError):
        dequantize(tensors, {"config.json": {}})
    out = tmp_path / "out0"
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {f"{name}.weight" for name in weights}
    assert sorted(set(index.values())) == sorted(p.name for p in out.glob("*.safetensors"))
    for name, weight in weights.items():
        stored = load_file(out / index[f"{name}.weight"])[f"{name}.weight"]
        assert torch.equal(stored.float(), round_to_nearest.rounded(weight, 4, 32, False).half())


def test_a_folder_without_config_json_is_read(dequantize: Run, round_to_nearest: Any) -> None:
    packed = round_to_nearest.pack_gptq(torch.randn(64, 64), 4, 32, True)
    found = dequantize({f"a.{role}": tensor for role, tensor in packed.items()}, {})
    assert set(found) == {"a.weight"}


def test_a_dense_folder_and_a_full_target_are_refused(
    dequantize: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        dequantize({"a.weight": torch.zeros(8, 8)}, {"config.json": {}})
    assert "dense already" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert main(["dequantize", str(tmp_path / "source0"), str(tmp_path / "full")]) == 2
    assert "not empty" in capsys.readouterr().err
