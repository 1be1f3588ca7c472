"""The plan's term for compiled decode steps against what a loaded model says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.fit_inputs import ask, this_machine
from ingle.model.decoder import Decoder
from ingle.model.segment_plan import extra_bytes, segment_shapes
from ingle.registry.loader import load_plugins

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"tie_word_embeddings": False},
    "Qwen3Config": {"head_dim": 16},
    "Gemma2Config": {"head_dim": 16},
    "Phi3Config": {},
    "MixtralConfig": {"num_local_experts": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_what_a_loaded_model_would_copy(
    family: str, demo_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = getattr(transformers, family)(**SIZES, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((demo_model_dir / file).read_bytes())
    options = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16")
    plan = ask(options, tmp_path, load_plugins(), this_machine("cpu"), 1).plan()
    model = build_engine_core(options).runner.model  # type: ignore[attr-defined]
    assert isinstance(model, Decoder)
    if segment_shapes(model, options.block_size) is None:
        assert plan.compiled_bytes == 0
    else:
        # Fewer where this processor's kernel reads the plain matrices itself.
        assert extra_bytes(model) in (plan.compiled_bytes, 0)
        assert plan.compiled_bytes > 0
