"""Scales are read or measured before a cache serves, and what it costs is measured and said."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ingle.engine import kv_start
from ingle.engine.model_runner import ModelRunner
from ingle.errors import ConfigError

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def tiny(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with the demo model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model_dir / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def large_keys(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same logits in 16 bit, with keys 4096 times as large: far outside of e4m3."""
    return with_large_keys(tiny, tmp_path_factory.mktemp("large") / "model", 4096)


def with_large_keys(source: Path, target: Path, factor: float) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.suffix in (".json", ".txt") and not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in tensors:
        if ".k_proj." in name:
            tensors[name] = tensors[name] * factor
        elif ".q_proj." in name:
            tensors[name] = tensors[name] / factor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def scales_of(core: Any, side: str = "k") -> list[list[float]]:
    assert isinstance(core.runner, ModelRunner)
    stores = [getattr(cache, f"{side}_store") for cache in core.runner.caches]
    return [store.head_scale.tolist() for store in stores]


def kl_of(core: Any) -> float:
    found = re.search(r"KL (\S+) nats", core.info.kv_cache_report)
    assert found is not None, core.info.kv_cache_report
    return float(found[1])


def test_keys_out_of_range_are_warned_of_and_measured_scales_repair_them(
    open_core: Any, large_keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ingle.engine"):
        unscaled = open_core(large_keys, "fp8", calculate_kv_scales=False)
    assert torch.tensor(kl_of(unscaled)).isfinite()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("SUFFERS" in w and "k=auto,v=fp8" in w for w in warnings)
    assert any("1.0 (--no-calculate-kv-scales)" in w for w in warnings)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ingle.engine"):
        measured = open_core(large_keys, "fp8")
    assert not caplog.records
    assert kl_of(measured) < kl_of(unscaled) / 10
    assert all(scale > 1 for layer in scales_of(measured) for scale in layer)


def test_the_exact_cache_is_not_checked(open_core: Any, tiny: Path) -> None:
    assert open_core(tiny, "auto").info.kv_cache_report == ""


@pytest.mark.parametrize("cache", ["int8", "int4", "k=int8,v=int4", "k=auto,v=fp8", "fp8_e5m2"])
def test_every_other_cache_is_checked_under_its_name(
    open_core: Any, tiny: Path, cache: str
) -> None:
    core = open_core(tiny, cache)
    assert f"KV cache {core.info.kv_cache_dtype} against 16 bit" in core.info.kv_cache_report
    assert kl_of(core) < kv_check_bound(cache)


def kv_check_bound(cache: str) -> float:
    return 1.0 if "int4" in cache else 0.1


def test_the_figures_are_kept_on_disk_until_the_model_changes(
    open_core: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_core(tiny, "int8").info.kv_cache_report
    (kept,) = json.loads((tmp_path / "cache" / "kv_check.json").read_text()).values()
    assert kept["num_tokens"] == 128
    with monkeypatch.context() as patch:
        patch.setattr(kv_start, "_run", None)
        assert open_core(tiny, "int8").info.kv_cache_report == first
    (tiny / "note.txt").write_text("a file more")
    open_core(tiny, "int8")
    assert len(json.loads((tmp_path / "cache" / "kv_check.json").read_text())) == 2


def test_a_damaged_record_of_figures_costs_only_time(
    open_core: Any, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kv_check.json").write_text("[")
    assert open_core(tiny, "int8").info.kv_cache_report


def scale_file(path: Path, layers: dict[str, Any]) -> str:
    content = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}}
    path.write_text(json.dumps({"model_type": "llama", **content}))
    return str(path)


def test_scales_come_from_a_file_as_vllm_writes_it(
    open_core: Any, tiny: Path, tmp_path: Path
) -> None:
    path = scale_file(tmp_path / "scales.json", {"0": 0.25, "1": {"k": [0.5, 2.0], "v": 4}})
    core = open_core(tiny, "fp8", quantization_param_path=path)
    assert scales_of(core) == [[0.25, 0.25], [0.5, 2.0]]
    assert scales_of(core, "v") == [[0.25, 0.25], [4.0, 4.0]]


def test_layers_without_a_scale_are_counted_and_measured(
    open_core: Any, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = scale_file(tmp_path / "scales.json", {"0": 0.25, "1": -1.0})
    with caplog.at_level(logging.WARNING, "ingle.engine"):
        core = open_core(tiny, "fp8", quantization_param_path=path)
    assert "SCALES FOR ONLY 2 of 4 sides" in caplog.text
    assert scales_of(core)[0] == [0.25, 0.25]
    assert scales_of(core)[1] != [-1.0, -1.0]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no scales"),
        ('{"kv_cache": {"scaling_factor": {"0": {"9": 1}}}}', "layer '9'"),
        ('{"kv_cache": {"scaling_factor": {"0": {"0": "x"}}}}', "must be a number"),
        ('{"kv_cache": {"scaling_factor": {"0": {"0": {"q": 1}}}}}', "must be a number"),
    ],
)
def test_a_scale_file_that_is_wrong_is_refused_by_name(
    open_core: Any, tiny: Path, tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"--quantization-param-path .*{complaint}"):
        open_core(tiny, "fp8", quantization_param_path=str(path))


def test_fp8_gives_nearly_twice_the_blocks_for_the_same_memory(open_core: Any, tiny: Path) -> None:
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": "4MiB", "max_model_len": 512}
    blocks = {
        cache: open_core(tiny, cache, **options).stats().kv_cache_blocks
        for cache in ("auto", "fp8", "int8", "int4")
    }
    assert blocks["fp8"] >= 1.95 * blocks["auto"]
    assert blocks["int8"] >= 1.7 * blocks["auto"]
    assert blocks["int4"] >= 3.2 * blocks["auto"]
