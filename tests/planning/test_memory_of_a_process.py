"""Memory that a plan predicts against what a process holds, from the outside: anonymous memory
(``RssAnon``) minus what it was after the imports, after loading and after a request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

MB = 10**6
SCRIPT = """
import json, re, sys
from pathlib import Path

import torch

import ingle.engine.engine as engine
from ingle import LLM, SamplingParams
from ingle.config import EngineConfig
from ingle.engine.fit import judge
from ingle.engine.fit_inputs import ask, this_machine
from ingle.registry.loader import load_plugins

def anonymous():
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def request(llm, tokens):
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)

config = EngineConfig(model=sys.argv[1], device="cpu", max_model_len=2048)
registry = load_plugins()
plan = judge(ask(config, Path(sys.argv[1]), registry, this_machine("cpu"), 1)).to_dict()
imported = anonymous()
core = engine.build_engine_core(config)
loaded = anonymous() - imported
core.compiler.compile_now()
llm = LLM.from_core(core)
request(llm, [3 + i % 900 for i in range(1500)])
stores = [s for cache in llm._core.runner.caches for s in (cache.k_store, cache.v_store)]
cache = sum(t.numel() * t.element_size() for s in stores for t in s.tensors().values())
print(json.dumps({
    "plan": plan,
    "report": core.info.memory_report,
    "compiled": core.compiler.is_compiled,
    "cache": cache,
    "loaded": loaded,
    "served": anonymous() - imported,
}))
"""
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def save_llama_1b(folder: Path, demo_model_dir: Path) -> Path:
    """A Llama of 1.07 billion weights in bf16, any numbers; the demo model's tokenizer."""
    shapes = {"q": (2048, 2048), "k": (256, 2048), "v": (256, 2048), "o": (2048, 2048)}
    numbers = torch.randn(5632 * 2048 + 1, generator=torch.Generator().manual_seed(1))
    numbers = (numbers / 50).bfloat16()

    def matrix(*shape: int) -> torch.Tensor:
        return numbers[: shape[0] * shape[1]].view(shape).clone()

    table = numbers.repeat(6)[: 32000 * 2048].view(32000, 2048)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    tensors["model.norm.weight"] = torch.ones(2048).bfloat16()
    for layer in range(22):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(*shape)
        for name in ("gate", "up"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = matrix(5632, 2048)
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(2048, 5632)
        for name in ("input", "post_attention"):
            tensors[f"{prefix}.{name}_layernorm.weight"] = torch.ones(2048).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA_1B))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model_dir / name).read_bytes())
    return folder


def save_awq(folder: Path, demo_model_dir: Path, plugins: Path) -> Path:
    """The demo model rounded to AWQ by ``ingle quantize``."""
    code = "import sys; from ingle.cli.app import run; sys.exit(run(sys.argv[1:]))"
    line = [
        "quantize",
        "--method",
        "rtn",
        "--no-measure-kl",
        str(demo_model_dir),
        str(folder),
        "--format",
        "awq",
    ]
    subprocess.run(
        [sys.executable, "-c", code, *line], check=True, env=environment(plugins, folder.parent)
    )
    return folder


def environment(plugins: Path, cache: Path) -> dict[str, str]:
    path = os.pathsep.join([str(plugins), *(entry for entry in sys.path if entry)])
    return {**os.environ, "PYTHONPATH": path, "INGLE_CACHE": str(cache / "cache")}


def measured(model: Path, plugins: Path, cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(plugins, cache),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_near(predicted: float, found: float) -> None:
    assert abs(found - predicted) <= max(0.03 * predicted, 64 * MB), (predicted / MB, found / MB)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells anonymous memory")
@pytest.mark.parametrize("kind", ["demo in bf16", "demo in awq", "a billion weights in bf16"])
def test_a_process_holds_what_the_plan_says_after_loading_and_after_a_request(
    kind: str, demo_model_dir: Path, installed_plugins: Path, tmp_path: Path
) -> None:
    model = demo_model_dir
    if kind.endswith("awq"):
        model = save_awq(tmp_path / "awq", demo_model_dir, installed_plugins)
    elif kind.startswith("a billion"):
        model = save_llama_1b(tmp_path / "large", demo_model_dir)
    found = measured(model, installed_plugins, tmp_path)
    plan = found["plan"]
    assert found["compiled"]
    loaded = plan["weights_bytes"] + plan["workspace_bytes"] + found["cache"]
    assert_near(loaded + plan["context_bytes"], found["loaded"])
    served = plan["total_bytes"] - plan["kv_cache_bytes"] + found["cache"]
    assert_near(served, found["served"])
    words = found["report"].replace(",", "").split()
    said = float(words[words.index("measured") - 2]) * 2**20
    assert abs(said - found["loaded"]) <= 64 * MB
