"""Tiny random models of every architecture the decoder knows: logits equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ingle import ConfigError
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
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.5 + 0.4 * pair for pair in range(8)],
    "rope_theta": 10000.0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_one_kv_head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("LlamaConfig", {"head_dim": 32}),
    "llama_gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "llama_rope_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_rope_linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama_rope_dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC}),
    "llama_rope_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "qwen2_rope_yarn_with_all_its_options": (
        "Qwen2Config",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_upper_windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3Config", {}),
    "phi4_partial_rotation": ("Phi3Config", {"rope_parameters": PARTIAL}),
    "phi3_window": ("Phi3Config", {"sliding_window": 24}),
    "phi3_longrope_long": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3_longrope_short": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
    ),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window_pattern": 3}),
    "gemma3_stretched_and_bounded": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "final_logit_softcapping": 5.0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.07,
            "logits_scaling": 6.0,
            "attention_bias": True,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6}),
    "mixtral_window": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 24}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe_every_other_layer": ("Qwen3MoeConfig", {**EXPERTS, "decoder_sparse_step": 2}),
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


@pytest.fixture(scope="module")
def runner(tiny: tuple[torch.nn.Module, Path]) -> ModelRunner:
    """Ours of the same weights. Every test begins at the first token, over what others left."""
    return runner_for(tiny[1])


@torch.inference_mode()
def step(runner: ModelRunner, token_ids: list[int], start: int) -> torch.Tensor:
    """Logits after each of ``token_ids[start:]``, those before being in the cache: [T, V]."""
    share = ScheduledRequest(
        request_id="r",
        token_ids=token_ids[start:],
        num_computed_tokens=start,
        block_table=[5, 2, 9, 1, 7, 3, 8, 4],
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=token_ids,
        output_token_ids=[],
        samples=False,
    )
    return runner.model.logits(runner.model.hidden_states(runner._batch((share,)), runner.caches))


def logits_of(runner: ModelRunner, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits after every token, computed ``chunk`` tokens at a time: [T, V]."""
    starts = range(0, len(token_ids), chunk)
    return torch.cat([step(runner, token_ids[: start + chunk], start) for start in starts])


def test_greedy_text_equals_transformers(
    tiny: tuple[torch.nn.Module, Path], runner: ModelRunner
) -> None:
    model, _ = tiny
    prompt = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = list(prompt)
    with torch.inference_mode():
        for _ in range(64):
            wanted.append(int(model(torch.tensor([wanted])).logits[0, -1].argmax()))
    found = list(prompt)
    for chunk in [len(prompt)] + [1] * 63:
        found.append(int(step(runner, found, len(found) - chunk)[-1].argmax()))
    assert found == wanted


@pytest.mark.parametrize("chunk", [1, 7, 100], ids=["token_by_token", "chunked", "whole"])
def test_logits_equal_transformers(
    tiny: tuple[torch.nn.Module, Path], runner: ModelRunner, chunk: int
) -> None:
    model, _ = tiny
    token_ids = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    found = logits_of(runner, token_ids, chunk)
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_a_plan_without_requests_runs_nothing(runner: ModelRunner) -> None:
    output = runner.execute(SchedulerOutput(scheduled=()))
    assert output.sampled == {}
    assert output.errors == {}


def save_llama(folder: Path, demo_model_dir: Path, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZE, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return model


@pytest.mark.parametrize("scaling", [DYNAMIC, LINEAR, YARN], ids=["dynamic", "linear", "yarn"])
def test_scaling_reaches_past_the_models_own_length(
    tmp_path: Path, demo_model_dir: Path, scaling: dict[str, Any]
) -> None:
    options = {"rope_parameters": dict(scaling), "max_position_embeddings": 64}
    model = save_llama(tmp_path, demo_model_dir, **options)
    token_ids = torch.randint(0, 128, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    found = logits_of(runner_for(tmp_path, max_model_len=100), token_ids, 7)
    assert (found - wanted).norm() / wanted.norm() < 1e-5


def test_overrides_stand_in_place_of_the_config(tmp_path: Path, demo_model_dir: Path) -> None:
    save_llama(tmp_path / "plain", demo_model_dir)
    other = {"rope_parameters": dict(LLAMA3), "rms_norm_eps": 0.01}
    model = save_llama(tmp_path / "other", demo_model_dir, **other)
    token_ids = list(range(20, 90))
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    runner = runner_for(
        tmp_path / "plain", rope_scaling=json.dumps(LLAMA3), hf_overrides='{"rms_norm_eps": 0.01}'
    )
    found = logits_of(runner, token_ids, 100)
    assert (found - wanted).norm() / wanted.norm() < 1e-5


@pytest.mark.parametrize("text", ["{", "[1]", "nothing"])
@pytest.mark.parametrize("option", ["hf_overrides", "rope_scaling"])
def test_overrides_that_are_no_object_are_refused_by_name(option: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}"):
        EngineConfig(**{option: text})
