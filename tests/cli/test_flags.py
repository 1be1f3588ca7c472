"""Flags, environment and YAML from dataclasses: spelling, precedence, and what errors say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ingle.cli import app
from ingle.cli.flags import attribute_docs, make_command
from ingle.cli.sampling import SamplingFlags
from ingle.config import EngineConfig


class Recorder:
    """A subcommand that remembers what it was called with."""

    def __init__(self) -> None:
        self.engine: EngineConfig = EngineConfig()
        self.prompt = ""
        self.sampling = SamplingFlags()
        self.calls = 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The recorder, installed as ``ingle record``."""
    recorder = Recorder()

    def record(
        engine: EngineConfig,
        sampling: SamplingFlags,
        prompt: str = "",
    ) -> None:
        """Remember what came.

        Args:
            prompt: The text.
        """
        recorder.engine, recorder.prompt, recorder.sampling = engine, prompt, sampling
        recorder.calls += 1

    command = make_command("record", record)
    monkeypatch.setattr(
        app, "find_command", lambda name, argv=(): command if name == "record" else None
    )
    monkeypatch.setattr(app, "find_commands", lambda: [command])
    for name in ("INGLE_MODEL", "INGLE_CONFIG", "INGLE_SEED"):
        monkeypatch.delenv(name, raising=False)
    return recorder


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--model folder", "model", "folder"),
        ("folder", "model", "folder"),
        ("-q awq", "quantization", "awq"),
        ("--quantization=gptq", "quantization", "gptq"),
        ("--kv-cache-dtype k=auto,v=fp8", "kv_cache_dtype", "k=auto,v=fp8"),
        ("-gmu 0.5", "gpu_memory_utilization", 0.5),
        ("-gmu0.5", "gpu_memory_utilization", 0.5),
        ("-gmu=0.5", "gpu_memory_utilization", 0.5),
        ("--gpu_memory_utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--max-model-len 8k", "max_model_len", 8192),
        ("--max-model-len auto", "max_model_len", "auto"),
        ("--max-model-len 4096", "max_model_len", 4096),
        ("--kv-cache-memory-bytes 4GiB", "kv_cache_memory_bytes", 4 * 1024**3),
        ("--max-num-seqs 4", "max_num_seqs", 4),
        ("--max-num-batched-tokens 512", "max_num_batched_tokens", 512),
        ("--block-size 64", "block_size", 64),
        ("--enable-prefix-caching", "enable_prefix_caching", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enable-prefix-caching false", "enable_prefix_caching", False),
        ("--enable-prefix-caching=false", "enable_prefix_caching", False),
        ("--enforce-eager", "enforce_eager", True),
        ("--single-user-mode true", "single_user_mode", True),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--seed -3", "seed", -3),
        ("--disable-plugin a b", "disable_plugin", ("a", "b")),
        ("--disable-plugin a --disable-plugin b", "disable_plugin", ("a", "b")),
    ],
)
def test_a_flag_sets_its_field(recorder: Recorder, argv: str, field: str, value: Any) -> None:
    assert app.run(["record", *argv.split()]) == 0
    assert getattr(recorder.engine, field) == value


def test_two_dataclasses_and_a_plain_parameter_share_one_command_line(recorder: Recorder) -> None:
    argv = ["record", "folder", "Hello there", "--top-k", "3", "--stop", "a", "b", "--seed", "1"]
    assert app.run(argv) == 0
    assert (recorder.engine.model, recorder.prompt) == ("folder", "Hello there")
    assert (recorder.sampling.top_k, recorder.sampling.stop) == (3, ("a", "b"))
    assert recorder.engine.seed == 1


def test_flag_wins_over_environment_over_yaml_over_default(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "ingle.yaml"
    settings.write_text("max-num-seqs: 3\nblock_size: 32\nseed: 5\nmodel: yaml\nrevision:\n")
    monkeypatch.setenv("INGLE_BLOCK_SIZE", "64")
    monkeypatch.setenv("INGLE_SEED", "6")
    monkeypatch.setenv("INGLE_ENFORCE_EAGER", "1")
    assert app.run(["record", "--config", str(settings), "--seed", "7"]) == 0
    engine = recorder.engine
    assert (engine.model, engine.max_num_seqs) == ("yaml", 3)
    assert (engine.block_size, engine.seed) == (64, 7)
    assert (engine.enforce_eager, engine.revision, engine.max_queue_len) == (True, None, 1024)


def test_the_yaml_file_may_hold_lists_switches_and_sizes(
    recorder: Recorder, tmp_path: Path
) -> None:
    settings = tmp_path / "ingle.yaml"
    settings.write_text(
        "disable-plugin: [a, b]\nenable-prefix-caching: false\nmax-model-len: 8k\n"
        "kv-cache-memory-bytes: 1GiB\ngpu-memory-utilization: 0.25\nstop: ['###']\n"
    )
    assert app.run(["record", f"--config={settings}"]) == 0
    engine = recorder.engine
    assert engine.disable_plugin == ("a", "b")
    assert engine.enable_prefix_caching is False
    assert (engine.max_model_len, engine.kv_cache_memory_bytes) == (8192, 1024**3)
    assert engine.gpu_memory_utilization == 0.25
    assert recorder.sampling.stop == ("###",)


def test_the_config_file_may_come_from_the_environment(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ingle.yaml").write_text("max-num-seqs: 3\n")
    monkeypatch.setenv("INGLE_CONFIG", str(tmp_path / "ingle.yaml"))
    assert app.run(["record"]) == 0
    assert recorder.engine.max_num_seqs == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--max-modl-len 8k", ["--max-modl-len", "Did you mean --max-model-len"]),
        ("--max-model-len 8q", ["--max-model-len", "'8q'", "8k"]),
        ("--max-num-seqs many", ["--max-num-seqs", "many"]),
        ("--max-num-seqs 0", ["--max-num-seqs", "at least 1"]),
        ("--dtype int3", ["--dtype", "int3", "bfloat16"]),
        ("-gmu 1.5", ["--gpu-memory-utilization", "1.5"]),
        ("--seed", ["--seed", "requires an argument"]),
        ("--config", ["--config", "value"]),
        ("--config /nowhere.yaml", ["--config", "/nowhere.yaml", "No such file"]),
        ("model prompt leftover", ["leftover"]),
        ("--enforce-eager=maybe", ["--enforce-eager", "maybe"]),
    ],
)
def test_a_wrong_command_line_is_one_line_on_stderr_and_exit_code_2(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], argv: str, words: list[str]
) -> None:
    assert app.run(["record", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert [word for word in words if word not in err] == []
    assert recorder.calls == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-modl-len: 8k", ["max-modl-len"]),
        ("- a\n- b", ["list"]),
        ("a: [", ["not valid YAML"]),
        ("max-num-seqs: 0", ["--max-num-seqs"]),
    ],
)
def test_a_wrong_yaml_file_is_one_line_on_stderr_and_exit_code_2(
    recorder: Recorder,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    words: list[str],
) -> None:
    settings = tmp_path / "ingle.yaml"
    settings.write_text(text)
    assert app.run(["record", "--config", str(settings)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert [word for word in words if word not in err] == []


def test_everything_after_a_lone_double_dash_is_text(recorder: Recorder) -> None:
    assert app.run(["record", "folder", "--", "--swap-space"]) == 0
    assert recorder.prompt == "--swap-space"


def test_help_shows_every_field_with_the_words_of_its_docstring(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["record", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    docs = attribute_docs(EngineConfig)
    for name in EngineConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown
        assert docs[name].split(".")[0].replace("`", "")[:30] in shown


def test_every_field_of_a_config_must_be_documented_to_have_help() -> None:
    for config in (EngineConfig, SamplingFlags):
        fields = set(config.__dataclass_fields__)
        assert set(attribute_docs(config)) == fields, config


def test_a_field_without_a_default_is_a_required_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Needy:
        """Wants something.

        Attributes:
            thing: What it wants.
        """

        thing: int

    seen: list[int] = []

    def need(needy: Needy) -> None:
        """Need a thing."""
        seen.append(needy.thing)

    need.__annotations__["needy"] = Needy
    command = make_command("need", need)
    monkeypatch.setattr(app, "find_command", lambda name, argv=(): command)
    assert app.run(["need", "--thing", "4"]) == 0
    assert seen == [4]
    assert app.run(["need"]) == 2
    assert "--thing" in capsys.readouterr().err
