"""Tiny random models of every architecture the decoder knows: logits equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest, SchedulerOutput
from ingle.request import SamplingParams

SIZE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_one_kv_head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("LlamaConfig", {"head_dim": 32}),
    "llama_rope_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_rope_linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}


@pytest.fixture(scope="module", params=list(CASES))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path
) -> tuple[torch.nn.Module, Path]:
    """transformers' own model, and the folder it saved."""
    name, options = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZE, **options})
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return model, folder


def runner_for(folder: Path, **options: Any) -> ModelRunner:
    core = build_engine_core(
        EngineConfig(model=str(folder), dtype="float32", block_size=16, device="cpu", **options)
    )
    assert isinstance(core.runner, ModelRunner)
    return core.runner


@torch.inference_mode()
def logits_of(runner: ModelRunner, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits after every token, computed ``chunk`` tokens at a time: [T, V]."""
    rows = []
    for start in range(0, len(token_ids), chunk):
        share = ScheduledRequest(
            request_id="r",
            token_ids=token_ids[start : start + chunk],
            num_computed_tokens=start,
            block_table=[5, 2, 9, 1, 7, 3, 8, 4],
            params=SamplingParams(),
            seed=0,
            prompt_token_ids=token_ids,
            output_token_ids=[],
            samples=False,
        )
        hidden = runner.model.hidden_states(runner._batch((share,)), runner.caches)
        rows.append(runner.model.logits(hidden))
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1, 7, 100], ids=["token_by_token", "chunked", "whole"])
def test_logits_equal_transformers(tiny: tuple[torch.nn.Module, Path], chunk: int) -> None:
    model, folder = tiny
    token_ids = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    found = logits_of(runner_for(folder), token_ids, chunk)
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_a_plan_without_requests_runs_nothing(tiny: tuple[torch.nn.Module, Path]) -> None:
    _, folder = tiny
    output = runner_for(folder).execute(SchedulerOutput(scheduled=()))
    assert output.sampled == {}
    assert output.errors == {}
