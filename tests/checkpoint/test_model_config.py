"""config.json against transformers' reading of it, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ingle import CheckpointError
from ingle.checkpoint.generation_defaults import GenerationDefaults, load_generation_defaults
from ingle.checkpoint.model_config import ACTIVATIONS, load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.model.layers import activation

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def folder(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {k: v for k, v in {**BASE, **changes}.items() if v != "absent"}
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def family(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


AGAINST_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama, as little as possible": {"num_key_value_heads": "absent"},
    "llama with everything": {
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "torch_dtype": "float16",
        "eos_token_id": [1, 2, 3],
        "bos_token_id": 0,
    },
    "llama 3.1 scaling": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "linear scaling under its old key": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "transformers 5 rope parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 250000.0}},
    "plain rope parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 70000.0}},
    "mistral with its default window": {**family("Mistral"), "head_dim": "absent"},
    "mistral with a window": {**family("Mistral"), "sliding_window": 1024},
    "mistral without a window": {**family("Mistral"), "sliding_window": None},
    "qwen2": {**family("Qwen2"), "tie_word_embeddings": True},
    "qwen2 with a window flag that is off": {**family("Qwen2"), "sliding_window": 128},
    "qwen2 with windows": {
        **family("Qwen2"),
        "use_sliding_window": True,
        "sliding_window": 128,
        "max_window_layers": 2,
    },
    "qwen3 without head size": family("Qwen3"),
    "qwen3 with layer types": {
        **family("Qwen3"),
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "linear scaling of another base": {
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    },
    "smollm3": family("SmolLM3"),
    "smollm3 with windows where it does not rotate": {
        **family("SmolLM3"),
        "no_rope_layers": [1, 0, 1, 1],
        "use_sliding_window": True,
        "sliding_window": 64,
    },
    "gemma2": {**family("Gemma2"), "head_dim": 16},
    "granite": {**family("Granite"), "embedding_multiplier": 12},
    "olmo2": {**family("Olmo2"), "pad_token_id": None},
    "mixtral": {**family("Mixtral"), "sliding_window": 64},
    "qwen2 moe": {**family("Qwen2Moe"), "model_type": "qwen2_moe"},
    "qwen2 moe with windows": {
        **family("Qwen2Moe"),
        "model_type": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 3,
    },
    "qwen3 moe": {**family("Qwen3Moe"), "model_type": "qwen3_moe", "head_dim": 32},
}


@pytest.mark.parametrize("case", AGAINST_TRANSFORMERS)
def test_the_config_says_what_transformers_reads(tmp_path: Path, case: str) -> None:
    path = folder(tmp_path, **AGAINST_TRANSFORMERS[case])
    ours, theirs = load_model_config(path), AutoConfig.from_pretrained(path)
    rope = dict(theirs.rope_parameters)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    found = ours.ropes[0]
    assert found is not None
    assert found.theta == rope.pop("rope_theta")
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    activation = getattr(theirs, "hidden_act", None) or theirs.hidden_activation
    assert ours.hidden_act == activation
    expected = None if rope["rope_type"] == "default" else rope
    scaling = found.scaling
    assert scaling == ({k: expected[k] for k in scaling} if scaling and expected else None)
    assert ours.sliding_window == (getattr(theirs, "sliding_window", None) or None)
    eos = theirs.eos_token_id
    if AGAINST_TRANSFORMERS[case].get("eos_token_id") is not None:
        assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [eos])
    types = getattr(theirs, "layer_types", None)
    if types is not None:
        assert list(ours.layer_types) == types


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_files_have_old_names_of_longrope(tmp_path: Path, name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    path = folder(
        tmp_path, **family("Phi3"), rope_scaling=scaling, original_max_position_embeddings=2048
    )
    rope = load_model_config(path).ropes[0]
    assert rope is not None
    assert rope.scaling == {
        "rope_type": "longrope",
        "short_factor": (1.0,) * 8,
        "long_factor": (2.0,) * 8,
        "original_max_position_embeddings": 2048,
    }


@pytest.mark.parametrize("spelling", ["before transformers 5", "transformers 5"])
def test_gemma3_has_a_base_for_windowed_layers(tmp_path: Path, spelling: str) -> None:
    stretched = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 7e5, "rope_local_base_freq": 5e3, "rope_scaling": stretched}
    new = {
        "rope_parameters": {
            "full_attention": {**stretched, "rope_theta": 7e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    changes = new if spelling == "transformers 5" else old
    config = {**family("Gemma3"), "sliding_window_pattern": 2, **changes}
    config["model_type"] = "gemma3_text"
    path = folder(tmp_path, **config)
    theirs = AutoConfig.from_pretrained(path)
    found = load_model_config(path)
    assert list(found.layer_types) == theirs.layer_types
    assert found.layer_types == ("sliding_attention", "full_attention") * 2
    for rope, kind in zip(found.ropes, found.layer_types, strict=True):
        assert rope is not None
        assert rope.theta == theirs.rope_parameters[kind]["rope_theta"]
        assert rope.scaling == (stretched if kind == "full_attention" else None)


def test_every_activation_a_config_may_name_is_computed() -> None:
    for name in ACTIVATIONS:
        assert activation(name)(torch.ones(2)).shape == (2,)


def test_mistral_windows_every_layer(tmp_path: Path) -> None:
    config = load_model_config(folder(tmp_path, **family("Mistral"), sliding_window=64))
    assert config.layer_types == ("sliding_attention",) * 4


@pytest.mark.parametrize(
    ("name", "flag", "expected"),
    [
        ("Llama", False, (False, False, False)),
        ("Llama", True, (True, True, False)),
        ("Mistral", True, (False, False, False)),
        ("Qwen2", False, (True, False, False)),
        ("Qwen3", True, (True, True, True)),
    ],
)
def test_biases_and_norms_are_those_of_the_model_class(
    tmp_path: Path, name: str, flag: bool, expected: tuple[bool, bool, bool]
) -> None:
    config = load_model_config(folder(tmp_path, **family(name), attention_bias=flag))
    found = (config.attention_bias, config.attention_output_bias, config.qk_norm)
    assert found == expected


def test_biases_and_norms_are_those_that_transformers_builds(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        path = folder(tmp_path, **family(name))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        names = set(model.state_dict())
        attention = "model.layers.0.self_attn."
        config = load_model_config(path)
        assert config.attention_bias == (attention + "q_proj.bias" in names), name
        assert config.attention_output_bias == (attention + "o_proj.bias" in names), name
        assert config.qk_norm == (attention + "q_norm.weight" in names), name


def test_end_tokens_of_both_files_are_united(tmp_path: Path) -> None:
    path = folder(tmp_path, {"eos_token_id": [7, 2], "bos_token_id": 9}, eos_token_id=2)
    config = load_model_config(path)
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 9


def test_the_dtype_comes_from_the_weights_when_the_config_is_silent(
    write_model: Callable[..., Path],
) -> None:
    tensors = {"codes": torch.zeros(2, dtype=torch.int32), "w": torch.zeros(2, dtype=torch.float16)}
    path = write_model({"model.safetensors": tensors}, torch_dtype=None)
    assert load_model_config(path, open_checkpoint(path).info()).dtype == "float16"
    assert load_model_config(path).dtype == "float32"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_under_both_keys(tmp_path: Path, key: str) -> None:
    assert load_model_config(folder(tmp_path, **{key: "torch.bfloat16"})).dtype == "bfloat16"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Llama"),
    "no architecture": ({"architectures": None, "model_type": "rwkv"}, "rwkv.*Supported are"),
    "architectures of another type": ({"architectures": [[1]]}, "not supported"),
    "unknown rope type": (
        {"rope_scaling": {"rope_type": "spiral"}},
        "one of default, linear, dynamic, yarn.*, but is 'spiral'",
    ),
    "rope without its factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope scaling of another type": ({"rope_scaling": [1]}, "rope_scaling must be"),
    "a factor below nothing": ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
    "crossed frequencies": ({"rope_scaling": {**LLAMA3, "low_freq_factor": 9}}, "low_freq_factor"),
    "rotation of more than a head": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    "rotation of half a pair": ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
    "longrope without its factors": (
        {"rope_scaling": {"type": "longrope"}},
        "short_factor is missing",
    ),
    "longrope with factors of another size": (
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor must be a list of 8",
    ),
    "no-rope layers of another type": (
        {**family("SmolLM3"), "no_rope_layers": ["no"] * 4},
        "no_rope_layers",
    ),
    "negative bound of logits": (
        {**family("Gemma2"), "attn_logit_softcapping": -1},
        "attn_logit_softcapping",
    ),
    "a multiplier that is no number": (
        {**family("Granite"), "residual_multiplier": "big"},
        "residual_multiplier",
    ),
    "more experts visited than there are": (
        {**family("Mixtral"), "num_experts_per_tok": 9},
        "num_experts_per_tok must be at most 8",
    ),
    "dense layers of another type": (
        {**family("Qwen3Moe"), "mlp_only_layers": 3},
        "mlp_only_layers",
    ),
    "unknown activation": ({"hidden_act": "gelu_fast"}, "hidden_act.*silu.*gelu_fast"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative size": ({"hidden_size": -64}, "hidden_size"),
    "huge size": ({"vocab_size": 2**40}, "vocab_size"),
    "size as a float": ({"intermediate_size": 128.0}, "intermediate_size"),
    "size as a text": ({"hidden_size": "64"}, "hidden_size"),
    "size as a boolean": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "missing size": ({"vocab_size": "absent"}, "vocab_size is missing"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads.*divisor of 4"),
    "width that does not divide": ({"hidden_size": 66}, "hidden_size.*multiple of 4"),
    "odd head": ({"head_dim": 15}, "head_dim must be even"),
    "zero epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "infinite theta": ({"rope_theta": float("inf")}, "rope_theta"),
    "end token out of vocabulary": ({"eos_token_id": 300}, "eos_token_id.*0 to 299"),
    "end token of another type": ({"eos_token_id": ["</s>"]}, "eos_token_id"),
    "flag as a text": ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    "dtype that is no activation dtype": ({"torch_dtype": "int8"}, "torch_dtype.*bfloat16"),
    "too few layer types": (
        {**family("Qwen3"), "use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_by_file_and_key(tmp_path: Path, case: str) -> None:
    changes, reason = REFUSED[case]
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_model_config(folder(tmp_path, **changes))
    assert "config.json" in str(caught.value)


def test_code_named_by_a_config_is_never_imported(write_model: Callable[..., Path]) -> None:
    tensors = {"model.safetensors": {"w": torch.zeros(1)}}
    path = write_model(
        tensors,
        auto_map={
            "AutoConfig": "booby_trap.Config",
            "AutoModelForCausalLM": "booby_trap.Model",
            "AutoTokenizer": ["booby_trap.Tokenizer", None],
        },
        trust_remote_code=True,
    )
    sprung = path / "sprung"
    (path / "booby_trap.py").write_text(f"open({str(sprung)!r}, 'w').close()\nraise SystemExit(13)")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["booby_trap.Tokenizer", None]}})
    )
    load_model_config(path, open_checkpoint(path).info())
    assert not sprung.exists()
    assert "booby_trap" not in sys.modules


def test_the_makers_sampling_values_are_read(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }
    assert load_generation_defaults(folder(tmp_path, generation)) == GenerationDefaults(
        temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_new_tokens=2048
    )


def test_without_the_file_there_are_no_sampling_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("top_p", 1.5), ("top_k", -2), ("top_p", "high"), ("min_p", True)],
)
def test_a_wrong_sampling_default_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}"):
        load_generation_defaults(folder(tmp_path, {key: value}))
