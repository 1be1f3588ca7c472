"""``ingle compile``: what is compiled once, before a server needs it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ingle.cli import main
from ingle.cli.session import Session
from ingle.config import EngineConfig


class Compiler:
    """Stands for a decode compiler."""

    def __init__(self, num_missing: int, works: bool = True) -> None:
        self.num_missing = num_missing
        self._works = works
        self.is_compiled = False

    def compile_now(self) -> None:
        """Compiles, or does not."""
        self.is_compiled = self._works


def compiled(monkeypatch: pytest.MonkeyPatch, *compilers: Compiler) -> None:
    """Makes the command find a model with these compilers."""
    info = SimpleNamespace(model="demo", device="cpu")
    session = SimpleNamespace(core=SimpleNamespace(compilers=compilers, info=info))
    monkeypatch.setattr(Session, "open", lambda config: session)


def test_compile_counts_what_was_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(monkeypatch, Compiler(3), Compiler(1))
    assert main(["compile", "demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_kernels"], report["is_compiled"], report["device"]) == (4, True, "cpu")
    assert report["compile_seconds"] >= 0
    compiled(monkeypatch, Compiler(0))
    assert main(["compile", "demo"]) == 0
    assert capsys.readouterr().out.startswith("0 kernels compiled in ")


@pytest.mark.parametrize("compilers", [(), (Compiler(4, works=False),)])
def test_compile_says_when_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compilers: tuple[Compiler, ...],
) -> None:
    compiled(monkeypatch, *compilers)
    assert main(["compile", "demo"]) == 0
    assert "Nothing is compiled for this model" in capsys.readouterr().out


def test_compile_asks_for_a_model_it_can_load(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """The shared session is in float32, for which there are no decode kernels."""
    assert main(["compile", "demo"]) == 0
    assert demo_commands[0].model == "demo"
    assert "Nothing is compiled" in capsys.readouterr().out
