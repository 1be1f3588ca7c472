"""``ingle fit`` on famous models: every figure is computed again here, from the models' shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ingle.cli.app import run
from ingle.config import EngineConfig
from ingle.engine.cards import card_of_device, find_card
from ingle.engine.fit import Question, Target, Verdict, judge
from ingle.engine.fit_advice import Suggestion, advise
from ingle.engine.fit_inputs import ask, planned_card
from ingle.registry.loader import load_plugins

GIB = 1024**3
Fit = Callable[..., Verdict]

# Llama-3-70B: 80 layers of q and o (8192 x 8192), k and v (1024 x 8192), three of 28672 x 8192.
LINEARS_70B = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
TABLE_70B = 128256 * 8192
NORMS_70B = (2 * 80 + 1) * 8192
KV_VALUES_70B = 2 * 80 * 8 * 128
LINEARS_8B = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)

# Qwen3-30B-A3B: 48 layers of q and o (4096 x 2048), k and v (512 x 2048), and 128 experts of three
# 768 x 2048; per layer a router (128 x 2048), two norms of 2048 and two of 128; a final norm.
LINEARS_30B = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048)
TABLE_30B = 151936 * 2048
SMALL_30B = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
KV_VALUES_30B = 2 * 48 * 4 * 128


def flags_to_options(flags: str) -> dict[str, str]:
    """``--max-model-len 4096`` as a keyword."""
    words = flags.split()
    return {k[2:].replace("-", "_"): v for k, v in zip(words[::2], words[1::2], strict=True)}


def test_llama_3_70b_in_awq_takes_37_gib_of_weights(fit: Fit) -> None:
    verdict = fit("70b-awq", "RTX 4090", max_model_len=8192)
    packed = LINEARS_70B * (4 + 4 / 128 + 16 / 128) / 8
    by_hand = packed + 2 * TABLE_70B * 2 + NORMS_70B * 2
    assert verdict.plan.weights.total_bytes == by_hand
    assert verdict.plan.weights.total_bytes / GIB == pytest.approx(37.0, abs=0.1)
    assert verdict.plan.weights.bits_per_weight == pytest.approx(4.15625)


def test_llama_3_70b_in_awq_does_not_fit_24_gib_whole(fit: Fit) -> None:
    verdict = fit("70b-awq", "RTX 4090", max_model_len=8192, kv_cache_dtype="fp8")
    assert not verdict.fits
    assert verdict.margin_bytes < -10 * GIB
    kinds = {suggestion.change for suggestion in advise(verdict)}
    assert kinds == {"bits_per_weight", "offload_layers", "gpu"}


def test_llama_3_70b_at_2_4_bits_fits_24_gib_with_fp8_and_embeddings_on_the_host(
    fit: Fit,
) -> None:
    verdict = fit("70b-exl2", "RTX 4090", max_model_len=8192, kv_cache_dtype="fp8")
    assert verdict.fits
    assert verdict.plan.embeddings_on_host
    assert verdict.plan.weights.bits_per_weight == pytest.approx(2.4, abs=0.01)
    assert verdict.plan.weights.embeddings_bytes == TABLE_70B * 2
    layers = LINEARS_70B * 2.4 / 8
    assert verdict.plan.weights_bytes == pytest.approx(layers + TABLE_70B * 6.03 / 8, rel=0.005)
    assert verdict.kv_cache_bytes == (8192 + 256) * KV_VALUES_70B
    assert 0.5 * GIB < verdict.margin_bytes < 2 * GIB


def test_qwen3_30b_a3b_takes_all_its_experts_and_not_just_the_active_ones(fit: Fit) -> None:
    verdict = fit("30b-moe", "RTX 4090", max_model_len=8192)
    by_hand = 2 * (LINEARS_30B + 2 * TABLE_30B + SMALL_30B)
    assert verdict.plan.weights.total_bytes == by_hand
    assert verdict.plan.weights.total_bytes / GIB == pytest.approx(56.9, abs=0.1)
    assert verdict.kv_cache_bytes == (8192 + 256) * KV_VALUES_30B * 2
    assert not verdict.fits


def test_qwen3_30b_a3b_in_awq_fits_24_gib(fit: Fit) -> None:
    verdict = fit("30b-moe-awq", "RTX 4090", max_model_len=8192)
    packed = LINEARS_30B * (4 + 4 / 128 + 16 / 128) / 8
    assert verdict.plan.weights.total_bytes == packed + 2 * (2 * TABLE_30B + SMALL_30B)
    routers = 48 * 128 * 2048  # linears too, and in 16 bits
    mixed = (packed + 2 * routers) * 8 / (LINEARS_30B + routers)
    assert verdict.plan.weights.bits_per_weight == pytest.approx(mixed)
    assert verdict.fits


def test_70b_at_2_4_bits_does_not_fit_with_embeddings_on_the_card(fit: Fit) -> None:
    options = {"max_model_len": 8192, "kv_cache_dtype": "fp8"}
    verdict = fit("70b-exl2", "RTX 4090", embedding_device="device", **options)
    assert not verdict.fits
    assert advise(verdict)[0].flags == "--embedding-device host"


def test_the_sum_is_the_sum_of_the_terms_and_the_budget_is_total_minus_reserve(fit: Fit) -> None:
    found = fit("8b", "RTX 4090", max_model_len=8192).to_dict()
    weights = 2 * (LINEARS_8B + 2 * 128256 * 4096 + 65 * 4096)
    assert found["weights_bytes"] == weights
    assert found["kv_cache_bytes_per_token"] == 2 * 32 * 8 * 128 * 2 == 131072
    assert found["kv_cache_bytes"] == (8192 + 256) * 131072
    # A chunk of 2,048 tokens in the MLP: residual and normed input, and four times its width.
    assert found["activation_bytes"] == 2048 * (2 * 4096 + 4 * 14336) * 2
    rotary = 2 * 8192 * 128 * 2
    assert found["workspace_bytes"] == rotary + 64 * 1024**2
    terms = ("weights", "kv_cache", "activation", "workspace", "graphs", "context")
    assert found["total_bytes"] == sum(found[f"{term}_bytes"] for term in terms)
    assert found["budget_bytes"] == 24 * GIB - found["reserve_bytes"]
    assert found["reserve_bytes"] / GIB == pytest.approx(0.6)
    assert found["fits"]
    assert found["margin_bytes"] == found["budget_bytes"] - found["total_bytes"]


def test_auto_takes_the_longest_context_that_fits(fit: Fit) -> None:
    verdict = fit("70b-exl2", "RTX 4090")
    assert verdict.fits
    assert verdict.max_model_len % 256 == 0
    assert not fit("70b-exl2", "RTX 4090", max_model_len=verdict.max_model_len + 256).fits


@pytest.mark.parametrize(
    ("model", "gpu", "sequences", "options"),
    [
        ("70b-exl2", "RTX 4090", 1, {"max_model_len": 8192}),
        ("8b", "RTX 4090", 12, {"max_model_len": 8192}),
        ("8b", "RTX 4080", 2, {"max_model_len": 2048}),
    ],
)
def test_every_suggested_flag_makes_it_fit(
    fit: Fit, model: str, gpu: str, sequences: int, options: dict[str, Any]
) -> None:
    verdict = fit(model, gpu, sequences, **options)
    if verdict.fits:
        assert advise(verdict) == []
        return
    flagged = [s for s in advise(verdict) if s.flags]
    for suggestion in flagged:
        changes = flags_to_options(suggestion.flags)
        count = int(changes.pop("max_num_seqs", sequences))
        assert fit(model, gpu, count, **{**options, **changes}).fits, suggestion


def test_expected_speed_is_bandwidth_arithmetic(fit: Fit) -> None:
    verdict = fit("70b-exl2", "RTX 4090", max_model_len=8192, kv_cache_dtype="fp8")
    read = verdict.plan.weights_bytes + 8192 * KV_VALUES_70B
    seconds = read / (0.85 * 1008e9) + 80 * 15e-6 + 50e-6
    assert verdict.tokens_per_second == pytest.approx(1 / seconds)
    assert 34 <= 1 / seconds <= 37


def test_offloading_is_priced_by_the_link(fit: Fit) -> None:
    options = {"max_model_len": 8192, "kv_cache_dtype": "fp8"}
    offload = next(
        s for s in advise(fit("70b-awq", "RTX 4090", **options)) if s.change == "offload_layers"
    )
    count = int(flags_to_options(offload.flags)["offload_layers"])
    # By hand: layers of 855,638,016 linears at 4.15625 bits; one is copied while another computes.
    layer = LINEARS_70B / 80 * (4 + 4 / 128 + 16 / 128) / 8
    verdict = fit("70b-awq", "RTX 4090", offload_layers=count, **options)
    assert verdict.fits
    assert not fit("70b-awq", "RTX 4090", offload_layers=count - 1, **options).fits
    assert verdict.plan.offloaded_bytes == count * layer
    assert verdict.plan.buffer_bytes == 2 * layer
    whole = fit("70b-awq", "RTX 4090", **options)
    assert whole.plan.weights_bytes - verdict.plan.weights_bytes == (count - 2) * layer
    assert offload.total_bytes == verdict.total_bytes <= verdict.budget_bytes
    # The link carries every layer once a token; two come over while the rest computes.
    assert offload.tokens_per_second == verdict.tokens_per_second
    assert offload.tokens_per_second is not None
    assert 25e9 / (count * layer) * 0.9 < offload.tokens_per_second <= 25e9 / (count * layer)


def test_gigabytes_to_offload_are_rounded_up_to_layers(fit: Fit) -> None:
    options = {"max_model_len": 8192, "kv_cache_dtype": "fp8"}
    layer = LINEARS_70B / 80 * (4 + 4 / 128 + 16 / 128) / 8
    verdict = fit("70b-awq", "RTX 4090", cpu_offload_gb=15, **options)
    assert verdict.plan.offloaded_layers == -(-15 * GIB // layer)
    assert fit("70b-awq", "RTX 4090", cpu_offload_gb=500, **options).plan.offloaded_layers == 80


def test_offloading_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--memory", "8GiB", "--offload-layers", "3", "--cpu-offload-gb", "2"]
    assert run(["fit", "anything", *arguments]) == 2
    assert "give one of them" in capsys.readouterr().err


MODELS = ("8b", "70b-awq", "70b-exl2", "30b-moe", "30b-moe-awq")


@pytest.mark.parametrize("model", MODELS)
def test_every_suggestion_fits_once_it_is_followed(
    model: str, header_folders: dict[str, Path], installed_plugins: Path
) -> None:
    base = EngineConfig(model=model)
    question = ask(base, header_folders[model], load_plugins(), card(24), 1)
    for gib, (length, cache, sequences) in product(
        (8, 12, 24, 48), ((8192, "auto", 1), (8192, "fp8_e4m3", 8), (4096, "auto", 3))
    ):
        config = replace(base, max_model_len=length)
        asked = replace(
            question, config=config, cache_format=cache, num_sequences=sequences, target=card(gib)
        )
        for suggestion in advise(judge(asked)):
            assert_fits(asked, suggestion)


def assert_fits(asked: Question, suggestion: Suggestion) -> None:
    """That ``asked`` fits with the suggestion followed."""
    if suggestion.change == "bits_per_weight":
        verdict = judge(asked)
        bits = float(suggestion.text.split(" at ")[1].split()[0])
        weights = verdict.plan.weights
        saved = weights.linear_bytes - weights.linear_values * bits / 8
        assert verdict.total_bytes - saved <= verdict.budget_bytes, suggestion
    elif suggestion.change == "gpu":
        for name in suggestion.text.split(": ")[1].split(", "):
            larger = planned_card(find_card(name), None, False)
            assert judge(replace(asked, target=larger)).fits, suggestion
    else:
        changes: dict[str, Any] = flags_to_options(suggestion.flags)
        count = int(changes.pop("max_num_seqs", asked.num_sequences))
        cache = changes.pop("kv_cache_dtype", asked.cache_format)
        numbers = {k: int(v) if v.isdigit() else v for k, v in changes.items()}
        config = replace(asked.config, **numbers)
        verdict = judge(replace(asked, config=config, num_sequences=count, cache_format=cache))
        assert verdict.fits, suggestion
        assert verdict.total_bytes == suggestion.total_bytes, suggestion


def card(gib: int) -> Target:
    return planned_card(None, gib * GIB, False)


def test_the_command_prints_json_for_the_demo_model(
    demo_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(demo_model_dir), "--memory", "24GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # SmolLM2-135M: 30 layers of 576, 1536 and 9 / 3 heads of 64; the tied head is a copy.
    linears = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    assert found["weights_bytes"] == 2 * (linears + 2 * 49152 * 576 + 61 * 576)
    assert found["kv_cache_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert found["fits"] is True
    assert found["suggestions"] == []


def test_the_command_says_in_words_what_does_not_fit_and_what_would(
    installed_plugins: Path, header_folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(header_folders["70b-awq"])
    assert run(["fit", path, "--gpu", "rtx-4090", "--max-model-len", "8k"]) == 0
    shown = capsys.readouterr().out
    assert "DOES NOT FIT with a context of 8,192 tokens" in shown
    assert "in host memory" in shown
    assert "bits per weight or less" in shown


def test_an_unknown_card_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "anything", "--gpu", "Quantum 7"]) == 2
    message = capsys.readouterr().err
    assert "--memory 24GiB" in message
    assert "RTX 4090" in message


def test_a_misspelt_card_is_refused_with_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "anything", "--gpu", "RTX4091"]) == 2
    message = capsys.readouterr().err
    assert "near it are RTX 4090" in message
    assert "Tesla" not in message


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "Tesla V100 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce GT 710", None),
    ],
)
def test_a_drivers_name_finds_its_card(said: str, name: str | None) -> None:
    found = card_of_device(said)
    assert (None if found is None else found.name) == name


def test_memory_without_a_unit_is_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "anything", "--memory", "24"]) == 2
    assert "--memory 24GiB" in capsys.readouterr().err


def test_a_hub_id_that_is_not_here_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert run(["fit", "nobody/nothing-of-that-name", "--memory", "8GiB"]) == 1
    assert "hf download" in capsys.readouterr().err
