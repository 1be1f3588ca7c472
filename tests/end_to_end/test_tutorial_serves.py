"""The package of docs/write_a_plugin.md, from an empty folder to a served answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from live_server import environment, live_server, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write_a_plugin.md"
PROMPT, NUM_TOKENS = "The capital of France is", 12


def build_package(folder: Path) -> Path:
    """Every file the page shows, where it says."""
    text = PAGE.read_text()
    (project,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    package = folder / "ingle-quant-rowint8"
    source = package / "src" / "ingle_quant_rowint8"
    (package / "tests").mkdir(parents=True)
    source.mkdir(parents=True)
    (package / "pyproject.toml").write_text(project)
    (source / "__init__.py").write_text("")
    (source / "plugin.py").write_text(blocks[0])
    (source / "format.py").write_text(blocks[1])
    (package / "tests" / "test_conformance.py").write_text(blocks[2])
    return package


def quantise(dense: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A rowint8 checkpoint of ``dense``, and what its linears decode to."""
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors, decoded = {}, {}
    for file in dense.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = tensor
                continue
            scale = tensor.float().abs().amax(1) / 127
            codes = (tensor.float() / scale[:, None]).round().to(torch.int8)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.codes": codes, f"{stem}.scale": scale}
            decoded[name] = codes.float() * scale[:, None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "rowint8"}
    (folder / "config.json").write_text(json.dumps(config))
    return decoded


def transformers_says(dense: Path, decoded: dict[str, torch.Tensor]) -> str:
    """transformers' greedy answer with the decoded weights in place."""
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model.load_state_dict(decoded, strict=False)
    tokenizer = AutoTokenizer.from_pretrained(dense)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.slow
def test_the_package_of_the_tutorial_is_built_installed_and_serves(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    package = build_package(tmp_path)
    site = tmp_path / "site"
    env = environment(site)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(package)], check=True, timeout=120)
    listed = run(tmp_path, ["plugins", "--json"], env)
    (plugin,) = [p for p in json.loads(listed.stdout)["plugins"] if p["name"] == "rowint8"]
    assert (plugin["status"], plugin["weight_formats"]) == ("ok", ["rowint8"])
    decoded = quantise(demo_model_dir, tmp_path / "model")
    flags = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
    with live_server(tmp_path, tmp_path / "model", *flags, env=env) as server:
        body = {"model": "model", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body).json()
        chosen = server.http.get("/v1/plugins").json()["chosen"]
    assert answer["choices"][0]["text"] == transformers_says(demo_model_dir, decoded)
    assert (chosen["format"], chosen["distribution"]) == ("rowint8", "ingle-quant-rowint8")
