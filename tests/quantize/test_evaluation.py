"""Models against their reference, held to what transformers computes for the same tokens."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ingle
from ingle import ConfigError
from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.cli import main
from ingle.quantize.divergence import bootstrap_interval
from ingle.quantize.evaluation import Evaluation, EvaluationConfig
from ingle.quantize.evaluation_text import text_windows
from ingle.quantize.quality_plot import svg_plot, write_plot
from ingle.quantize.teacher_forcing import load_forced

TEXT = "Bread needs flour, water, salt and time. The dough rests while the oven warms. " * 12
WINDOW = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> SimpleNamespace:
    """A tiny model with the demo's tokenizer, the same with noise on its weights, and a text."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.4,
    )
    original, noisy = folder / "original", folder / "noisy"
    LlamaForCausalLM(config).save_pretrained(original)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(demo_model_dir / name, original / name)
    shutil.copytree(original, noisy)
    weights = load_file(noisy / "model.safetensors")
    noise = {n: t + 0.05 * torch.randn_like(t) for n, t in weights.items() if "proj" in n}
    save_file({**weights, **noise}, noisy / "model.safetensors", metadata={"format": "pt"})
    text = folder / "text.txt"
    text.write_text(TEXT)
    return SimpleNamespace(original=str(original), noisy=str(noisy), text=str(text))


@pytest.fixture(scope="module")
def found(models: SimpleNamespace) -> list[Evaluation]:
    return ingle.evaluate(
        [models.noisy, models.original],
        reference=models.original,
        text=models.text,
        window=WINDOW,
        dtype="float32",
    )


def transformers_figures(models: SimpleNamespace) -> tuple[float, float, float]:
    """Perplexity, KL and agreement of the noisy model, window by window, in float64."""
    tokenizer = load_tokenizer(models.original)
    ids = tokenizer.encode(TEXT)
    reference, noisy = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (models.original, models.noisy)
    )
    losses, divergences, agreements = [], [], []
    for start in range(0, len(ids), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if window.shape[1] < 2:
            continue
        with torch.no_grad():
            p, q = (m(window).logits[0, :-1].double() for m in (reference, noisy))
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        losses.append(torch.nn.functional.nll_loss(log_q, window[0, 1:], reduction="none"))
        divergences.append(torch.nn.functional.kl_div(log_q, log_p.exp(), reduction="none").sum(-1))
        agreements.append((p.argmax(-1) == q.argmax(-1)).double())
    loss, kl, agreed = (torch.cat(parts) for parts in (losses, divergences, agreements))
    return float(loss.mean().exp()), float(kl.mean()), float(agreed.mean())


def test_the_figures_are_those_that_transformers_logits_give(
    models: SimpleNamespace, found: list[Evaluation]
) -> None:
    perplexity, kl, top1 = transformers_figures(models)
    assert kl > 0.001
    assert found[0].perplexity == pytest.approx(perplexity, rel=1e-4)
    assert found[0].kl == pytest.approx(kl, rel=1e-3)
    assert found[0].top1 == pytest.approx(top1, abs=2 / found[0].num_tokens)


def test_a_model_is_its_own_reference_exactly(found: list[Evaluation]) -> None:
    itself = found[1]
    assert (itself.kl, itself.top1) == (0.0, 1.0)
    assert itself.perplexity == itself.reference_perplexity


def test_an_interval_lies_around_its_mean(found: list[Evaluation]) -> None:
    low, high = found[0].kl_interval
    assert low < found[0].kl < high


def test_an_interval_of_the_mean_has_the_width_that_theory_gives() -> None:
    torch.manual_seed(1)
    low, high = bootstrap_interval(torch.randn(64 * 400, dtype=torch.float64))
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(64 * 400), rel=0.15)


def test_bits_and_bytes_are_counted_as_stored(found: list[Evaluation]) -> None:
    assert found[0].bits_per_weight == 32.0
    assert found[0].head_bits_per_weight == 32.0
    tensors = load_file(Path(found[0].model) / "model.safetensors")
    assert found[0].bytes == sum(t.numel() * 4 for t in tensors.values())


def test_a_smaller_cache_type_costs_something_and_the_reference_keeps_its_own(
    models: SimpleNamespace,
) -> None:
    plain, small = ingle.evaluate(
        [models.original], ["auto", "fp8"], text=models.text, window=WINDOW, dtype="float32"
    )
    assert plain.kl == 0.0
    assert small.kl > 1e-5
    assert small.reference_perplexity == plain.perplexity
    assert (plain.kv_cache_dtype, small.kv_cache_dtype) == ("auto", "fp8")


def test_windows_hold_the_text_once_and_in_order(models: SimpleNamespace) -> None:
    tokenizer = load_tokenizer(models.original)
    config = EvaluationConfig(text=models.text, window=WINDOW, max_tokens=100)
    windows = text_windows(config, tokenizer)
    assert [len(window) for window in windows] == [48, 48, 4]
    assert sum(windows, []) == tokenizer.encode(TEXT)[:100]  # noqa: RUF017


def test_each_window_begins_as_the_tokenizer_begins_texts(models: SimpleNamespace) -> None:
    tokenizer = load_tokenizer(models.original)
    begun = SimpleNamespace(
        bos_token_id=1,
        encode=lambda text, add_special_tokens=True, **options: (
            [1] * add_special_tokens + tokenizer.encode(text, add_special_tokens=False)
        ),
    )
    config = EvaluationConfig(text=models.text, window=WINDOW)
    windows = text_windows(config, begun)  # type: ignore[arg-type]
    assert {window[0] for window in windows} == {1}
    assert {len(window) for window in windows[:-1]} == {WINDOW}


def test_without_a_text_the_pages_that_come_with_python_are_read(models: SimpleNamespace) -> None:
    windows = text_windows(EvaluationConfig(max_tokens=900), load_tokenizer(models.original))
    assert [len(window) for window in windows] == [512, 388]


def test_a_window_longer_than_the_model_is_cut_to_it(models: SimpleNamespace) -> None:
    (itself,) = ingle.evaluate([models.original], text=models.text, window=512, max_tokens=200)
    assert itself.num_tokens == 127 + 71


def test_only_the_head_of_a_reference_is_kept(models: SimpleNamespace) -> None:
    config = EvaluationConfig(window=WINDOW)
    forced = load_forced(config, models.original, "auto")
    forced.read([[5, 6, 7]])
    kept = forced.head_only()
    expected = forced.logits(torch.arange(3))
    forced.close()
    assert torch.equal(kept.logits(torch.arange(3)), expected)
    assert kept._runner is None
    assert kept._logits.__self__.layers == ()  # type: ignore[attr-defined]


def test_the_command_writes_a_table_a_json_file_and_a_picture(
    models: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", models.noisy, models.original, "--reference", models.original]
    argv += ["--text", models.text, "--window", str(WINDOW), "--max-tokens", "96"]
    argv += ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert main(argv) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["model"] for row in rows] == [models.noisy, models.original]
    wanted = {"model", "bits_per_weight", "bytes", "perplexity", "kl", "top1"}
    assert all(wanted <= row.keys() for row in rows)
    table = capsys.readouterr().out
    assert "noisy" in table
    assert "perplexity" in table
    assert (tmp_path / "out.svg").read_text().startswith("<svg ")


def test_the_command_prints_json_when_told_to(
    models: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", models.original, "--reference", models.original, "--text", models.text]
    assert main([*argv, "--window", str(WINDOW), "--max-tokens", "96", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kl"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", "/no/such/file"], "--text /no/such/file cannot be read"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--plot", "x.gif"], "ends in .svg or .png"),
        (["--window", "1"], "--window must be at least 2"),
        (["--kv-cache-dtype", "nonsense"], "nonsense"),
    ],
)
def test_what_cannot_work_is_said_by_the_name_of_the_flag(
    models: SimpleNamespace,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", models.original, *flags]) != 0
    assert message in capsys.readouterr().err


def test_models_of_two_vocabularies_are_not_compared(
    models: SimpleNamespace, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(models.original, other)
    weights = load_file(other / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name] = weights[name][:49000].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 49000}))
    with pytest.raises(ConfigError, match="only models with one vocabulary"):
        ingle.evaluate([str(other)], reference=models.original, text=models.text, window=WINDOW)


def test_a_picture_shows_every_model_and_its_figures(found: list[Evaluation]) -> None:
    picture = svg_plot(found)
    assert picture.count("<circle") == 3  # two models and one entry of the legend
    assert "noisy: 32.000 bits" in picture


def test_png_without_matplotlib_is_refused_with_the_remedy(
    found: list[Evaluation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingle.quantize.quality_plot.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        write_plot(found, tmp_path / "out.png")
