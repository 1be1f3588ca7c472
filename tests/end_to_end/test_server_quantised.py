"""The demo model packed as AWQ, served by a real process: it says what the weights that the files
stand for say, and an fp8 cache serves too."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from live_server import live_server, run
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

GROUP = 64
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
PROMPTS = ("The capital of France is", "Once upon a time", "def add(a, b):\n    return")


def packer() -> ModuleType:
    """The module that packs, out of the folder of the formats' tests."""
    path = Path(__file__).parents[1] / "formats" / "round_to_nearest.py"
    spec = importlib.util.spec_from_file_location("round_to_nearest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(source: Path, folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """A model folder with these tensors and the rest of ``source``."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    facts = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, **config}))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def pack_awq(tools: ModuleType, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits with zeros, every layer."""
    packed: dict[str, torch.Tensor] = tools.pack_awq_gemm(weight, GROUP)
    return packed


def pack_gptq(tools: ModuleType, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits, symmetric in attention; 8 bits in act-order where MLPs come down."""
    down = "down_proj" in name
    order = torch.randperm(weight.shape[1]) if down else None
    packed: dict[str, torch.Tensor] = tools.pack_gptq(
        weight, 8 if down else 4, GROUP, "attn" in name, order
    )
    return packed


def pack_exl2(tools: ModuleType, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """6, 5 and 4 bits in one matrix, most inputs at 4, in a random order."""
    sections = ((6, 64, 32), (5, 96, 64), (4, -1, 128))
    packed: dict[str, torch.Tensor] = tools.pack_exl2(
        weight, sections, torch.randperm(weight.shape[1])
    )
    return packed


PACKERS = {"awq": pack_awq, "gptq": pack_gptq, "exl2": pack_exl2}


def pack(demo: Path, folder: Path, method: str) -> Path:
    """The demo model packed; its tied head, as EXL2 keeps it, too."""
    torch.manual_seed(0)
    tools = packer()
    tensors = {}
    dense = load_file(next(demo.glob("*.safetensors")))
    if method == "exl2":
        dense["lm_head.weight"] = dense["model.embed_tokens.weight"]
    for name, tensor in dense.items():
        linear = name.removesuffix(".weight")
        if not linear.endswith(("_proj", "lm_head")):
            tensors[name] = tensor.float()
            continue
        parts = PACKERS[method](tools, linear, tensor.float())
        tensors |= {f"{linear}.{role}": part for role, part in parts.items()}
    how = {"quant_method": method, "bits": 4, "group_size": GROUP, "zero_point": True}
    return write(demo, folder / method, tensors, quantization_config=how, torch_dtype="float32")


def answers(folder: Path, model: Path, *flags: str) -> list[str]:
    """What a server of ``model`` says to every prompt, greedily."""
    folder.mkdir()
    with live_server(folder, model, "--served-model-name", "m", *FLAGS, *flags) as server:
        texts = []
        for prompt in PROMPTS:
            body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0}
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
        assert "Traceback" not in server.log
        return texts


@pytest.mark.parametrize(
    "method", ["awq", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gptq", "exl2"))]
)
def test_a_packed_model_says_what_its_own_dequantised_weights_say(
    method: str, tmp_path: Path, demo_model_dir: Path
) -> None:
    packed, dense = pack(demo_model_dir, tmp_path, method), tmp_path / "dense"
    done = run(tmp_path, ["dequantize", packed, dense, "--dtype", "float32"])
    assert done.returncode == 0, done.stderr
    texts = answers(tmp_path / "one", packed)
    assert texts == answers(tmp_path / "other", dense)
    assert all(len(text) > 8 for text in texts)


@pytest.mark.parametrize("kind", ["fp8", "k=auto,v=fp8_e5m2"])
def test_an_fp8_cache_serves(tmp_path: Path, demo_model_dir: Path, kind: str) -> None:
    texts = answers(tmp_path / "fp8", demo_model_dir, "--kv-cache-dtype", kind)
    assert "Paris" in texts[0]


def test_weights_that_are_no_numbers_fail_the_request_and_not_the_server(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    tensors = load_file(next(demo_model_dir.glob("*.safetensors")))
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    model = write(demo_model_dir, tmp_path / "model", tensors)
    with live_server(tmp_path, model, *FLAGS) as server:
        body = {"model": "model", "prompt": "a", "max_tokens": 4}
        for _ in range(2):
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 500
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert server.http.get("/health").status_code == 200
        assert server.is_idle()
