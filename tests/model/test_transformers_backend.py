"""Families that only transformers' code knows: logits on the paged cache equal transformers'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ingle import CheckpointError
from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest
from ingle.llm import LLM
from ingle.model.transformers_backend.model import TransformersModel
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
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neox_in_sequence": ("GPTNeoXConfig", {"use_parallel_residual": False}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "starcoder2_window": ("Starcoder2Config", {"sliding_window": 24}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2_windows": ("Cohere2Config", {"sliding_window": 24}),
    "nemotron": ("NemotronConfig", {}),
    "glm": ("GlmConfig", {"head_dim": 16, "eos_token_id": [3, 4]}),
    "glm4": ("Glm4Config", {"head_dim": 16, "eos_token_id": 3}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("PhiConfig", {}),
    "olmo": ("OlmoConfig", {"clip_qkv": 3.0}),
    "exaone4": ("Exaone4Config", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "llama_dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "olmoe": ("OlmoeConfig", EXPERTS),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 24}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "sliding_window": None}),
}
"""What a user might bring; the own decoder's Llama and Mixtral run here by --model-impl."""


def save_tiny(name: str, folder: Path, demo_model_dir: Path) -> Any:
    """transformers' own random model, saved with the demo's tokenizer."""
    config_class, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZE, **options})
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return model


@pytest.fixture(scope="module", params=list(CASES))
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path
) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(request.param, folder, demo_model_dir), folder


def runner_for(folder: Path, **options: Any) -> ModelRunner:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        block_size=16,
        device="cpu",
        model_impl="transformers",
        **options,
    )
    runner = build_engine_core(config).runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, TransformersModel)
    return runner


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


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 128, (count,), generator=generator).tolist()
    return tokens


def test_logits_equal_transformers(tiny: tuple[Any, Path]) -> None:
    """Whole, in chunks and token by token."""
    model, folder = tiny
    token_ids = random_tokens(100, 1)
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    runner = runner_for(folder, max_model_len=128)
    for chunk in (1, 7, 100):
        found = logits_of(runner, token_ids, chunk)
        assert (found - wanted).norm() / wanted.norm() < 1e-5
        assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_greedy_text_equals_transformers_in_a_batch(tiny: tuple[Any, Path]) -> None:
    """Three prompts together, prefilled in chunks, 64 tokens each."""
    model, folder = tiny
    prompts = [random_tokens(length, length) for length in (40, 3, 21)]
    llm = LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        block_size=16,
        model_impl="transformers",
        max_model_len=128,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for output, prompt in zip(llm.generate(prompts, params, use_tqdm=False), prompts, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt, 64)


def test_auto_takes_the_own_decoder_where_it_can_and_the_backend_elsewhere(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    for name, kind in (("mixtral", "ingle"), ("stablelm", "transformers")):
        save_tiny(name, tmp_path / name, demo_model_dir)
        core = build_engine_core(EngineConfig(model=str(tmp_path / name), device="cpu"))
        assert core.info.plugin_report["chosen"]["implementation"] == kind


def test_the_own_decoder_says_that_it_does_not_know_a_family(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    save_tiny("stablelm", tmp_path, demo_model_dir)
    with pytest.raises(CheckpointError, match="StableLmForCausalLM is not supported"):
        build_engine_core(EngineConfig(model=str(tmp_path), device="cpu", model_impl="ingle"))


def test_bfloat16_is_served(tmp_path: Path, demo_model_dir: Path) -> None:
    save_tiny("stablelm", tmp_path, demo_model_dir)
    llm = LLM(str(tmp_path), dtype="bfloat16", device="cpu", max_model_len=128)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


OTHERS = {
    "encoder_decoder": ("T5ForConditionalGeneration", {"model_type": "t5"}, "encoder"),
    "state_space": (
        "MambaForCausalLM",
        {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "0 of its 2 layers",
    ),
    "hybrid": (
        "Lfm2ForCausalLM",
        {
            "model_type": "lfm2",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention"],
        },
        "not supported",
    ),
    "own_attention": (
        "BloomForCausalLM",
        {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},
        "not supported",
    ),
    "another_head": ("LlamaModel", {"model_type": "llama"}, "LlamaForCausalLM"),
    "unknown": ("NewForCausalLM", {"model_type": "brand_new"}, "brand_new"),
    "no_language_model": ("ViTForImageClassification", {"model_type": "vit"}, "not supported"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_served_is_refused_by_name_before_anything_is_loaded(
    case: str, tmp_path: Path, demo_model_dir: Path
) -> None:
    name, config, reason = OTHERS[case]
    save_tiny("stablelm", tmp_path, demo_model_dir)
    raw = {"architectures": [name], "vocab_size": 128, **config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="not supported") as refusal:
        build_engine_core(EngineConfig(model=str(tmp_path), device="cpu"))
    assert name in str(refusal.value)
    assert reason in str(refusal.value)


def test_code_that_a_checkpoint_brings_is_never_run(tmp_path: Path, demo_model_dir: Path) -> None:
    model = save_tiny("stablelm", tmp_path, demo_model_dir)
    (tmp_path / "modeling_trap.py").write_text("raise SystemExit('imported')")
    raw = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "modeling_trap.C", "AutoModelForCausalLM": "modeling_trap.M"}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "auto_map": code}))
    runner = runner_for(tmp_path)
    assert int(step(runner, [5, 6, 7], 0)[-1].argmax()) == greedy(model, [5, 6, 7], 1)[0]


@pytest.mark.parametrize("lost", ["mlp.up_proj.weight", "input_layernorm.bias", "q_proj.bias"])
def test_a_missing_tensor_is_named(lost: str, tmp_path: Path, demo_model_dir: Path) -> None:
    save_tiny("stablelm", tmp_path, demo_model_dir)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(lost))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(name.removesuffix(".weight"))):
        runner_for(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, demo_model_dir: Path) -> None:
    save_tiny("gpt2", tmp_path, demo_model_dir)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.ln_f.weight"] = torch.ones(65)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"transformer\.ln_f\.weight"):
        runner_for(tmp_path)


def test_a_checkpoint_without_the_base_models_prefix_is_read(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    model = save_tiny("gpt2", tmp_path, demo_model_dir)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    found = step(runner_for(tmp_path), [5, 6, 7], 0)
    with torch.inference_mode():
        wanted = model(torch.tensor([[5, 6, 7]])).logits[0]
    assert (found - wanted).norm() / wanted.norm() < 1e-5
