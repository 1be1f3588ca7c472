"""Memory predicted from headers against what loading takes, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 1024**2
SCRIPT = """
import sys, json
from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
core = build_engine_core(EngineConfig(**json.loads(sys.argv[1])))
print(core.info.memory_report)
"""


@pytest.fixture(scope="module")
def untied_folder(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a head of its own, in float32; the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model_dir / name).read_bytes())
    return folder


def predicted_and_measured(model: Path, **options: object) -> tuple[float, float]:
    arguments = json.dumps({"model": str(model), **options})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], capture_output=True, text=True, check=True
    )
    words = done.stdout.replace(",", "").split()
    return float(words[words.index("predicted") - 2]), float(words[words.index("measured") - 2])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells anonymous memory")
@pytest.mark.parametrize("case", ["demo in bf16", "demo in float32", "untied in bf16"])
def test_prediction_is_within_3_percent_or_64_mib(
    case: str, demo_model_dir: Path, untied_folder: Path
) -> None:
    name, _, dtype = case.partition(" in ")
    folder = demo_model_dir if name == "demo" else untied_folder
    options = {"dtype": "bfloat16" if dtype == "bf16" else dtype, "max_model_len": 2048}
    predicted, measured = predicted_and_measured(folder, **options)
    assert abs(measured - predicted) <= max(0.03 * predicted, 64), (predicted, measured)
