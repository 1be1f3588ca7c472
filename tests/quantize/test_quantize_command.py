"""``ingle quantize`` as a user types it: every format through one command, kills, wrong flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ingle.cli import main

STRANGER = Path(__file__).resolve().parents[1] / "formats" / "stranger"
ROWS = ("--calibration-rows", "8", "--calibration-length", "32")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    installed_formats: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Run:
    """Runs ``ingle`` in this process; gives the exit code and both outputs."""
    monkeypatch.syspath_prepend(str(STRANGER))
    monkeypatch.syspath_prepend(str(installed_formats))
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))

    def command(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return command


def test_a_strangers_format_is_made_and_measured_by_the_same_command(
    run: Run, tiny_llama: Path, calibration_text: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = ("--reach", "0.95", "--calibrated", "--calibration", calibration_text, *ROWS)
    code, said, _ = run("quantize", tiny_llama, out, "--format", "nf4-blocks", *flags)
    assert code == 0
    assert "nf4-blocks, 4.250 bits per weight" in said
    assert "KL 0." in said
    card = (out / "README.md").read_text()
    assert "Normal floats in blocks of 64." in card
    assert "| bits per weight | 4.250 (layers)" in card
    assert "KL from the original" in card
    assert "reach 0.95" in card
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "nf4-blocks"
    assert block["meta"]["calibration"] == {
        "source": calibration_text,
        "rows": 8,
        "length": 32,
        "digest": block["meta"]["calibration"]["digest"],
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--format is missing; give one of awq, exl2, gptq, nf4-blocks"),
        (["--format", "gguf"], "gguf"),
        (["--format", "gptq", "--bits", "5"], "--bits must be one of 2, 3, 4, 8: 5"),
        (["--format", "gptq", "--group-size", "0"], "--group-size must be -1 or at least 8"),
        (["--format", "awq", "--bits", "2"], "--bits must be one of 3, 4, 8: 2"),
        (["--format", "awq", "--bpw", "3"], "--bpw"),
        (["--format", "exl2", "--bpw", "1.5"], "--bpw must be above 2 and at most 8.1"),
        (["--format", "exl2", "--head-bits", "7"], "--head-bits must be one of"),
        (["--format", "exl2", "--measurement", "/no/m.json"], "there is no folder /no"),
        (["--format", "nf4-blocks", "--reach", "2"], "--reach must be above 0"),
        (["--format", "gptq", "--dynamic", "{"], "--dynamic cannot be understood"),
        (["--format", "gptq", "--calibration", "/no/file"], "--calibration /no/file"),
        (["--format", "gptq", "--calibration-rows", "0"], "--calibration-rows must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_said_in_a_line_and_nothing_is_written(
    flags: Sequence[str], message: str, run: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    code, _, complaint = run("quantize", tiny_llama, tmp_path / "out", *flags)
    assert code in (1, 2)
    assert message in complaint
    assert "Traceback" not in complaint
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_used_and_a_model_that_is_quantised_are_refused(
    run: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    rtn = ("--format", "gptq", "--group-size", "32", "--method", "rtn", "--no-measure-kl")
    out = tmp_path / "out"
    assert run("quantize", tiny_llama, out, *rtn)[0] == 0
    code, _, complaint = run("quantize", tiny_llama, out, *rtn)
    assert code == 2
    assert f"{out} exists already and is not empty; give a new folder." in complaint
    code, _, complaint = run("quantize", out, tmp_path / "again", *rtn)
    assert code == 2
    assert "is quantised already (gptq)" in complaint
    code, _, complaint = run("quantize", tmp_path / "nothing", tmp_path / "x", *rtn)
    assert code == 1
    assert str(tmp_path / "nothing") in complaint


CALIBRATED = {
    "awq": ("--group-size", "32"),
    "gptq": ("--group-size", "32", "--desc-act"),
    "exl2": ("--bpw", "4.6"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["gptq", *(pytest.param(form, marks=pytest.mark.long) for form in ("awq", "exl2"))]
)
def test_a_process_that_is_killed_twice_goes_on_to_the_same_bytes(
    form: str,
    tiny_llama: Path,
    calibration_text: str,
    installed_formats: Path,
    tmp_path: Path,
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(installed_formats), *filter(None, sys.path)]),
        "INGLE_CACHE": str(tmp_path / "cache"),
    }
    flags = ("--calibration", calibration_text, *ROWS, "--format", form, *CALIBRATED[form])

    def start(out: Path) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "ingle", "quantize", str(tiny_llama), str(out), *flags]
        return subprocess.Popen(argv, env=environment)

    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert start(undisturbed).wait() == 0
    for passed in (1, 2):
        process = start(killed)
        while _blocks_done(killed) < passed and process.poll() is None:
            pass
        process.kill()
        assert process.wait() == -9
        assert not (killed / "config.json").exists()
    assert start(killed).wait() == 0
    names = sorted(file.name for file in undisturbed.iterdir())
    assert names == sorted(file.name for file in killed.iterdir())
    for name in names:
        assert (undisturbed / name).read_bytes() == (killed / name).read_bytes(), name


def _blocks_done(out: Path) -> int:
    """Blocks of both passes that a run has behind it."""
    try:
        state = json.loads((out / ".quantize" / "run.json").read_text())
    except FileNotFoundError:
        return 0
    before = len(state["measurements"]) if state["stage"] == "quantize" else 0
    return int(state["next_block"]) + before
