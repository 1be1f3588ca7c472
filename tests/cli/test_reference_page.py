"""``docs/cli.md`` is what ``make docs`` would write now."""

from __future__ import annotations

from pathlib import Path

from ingle.cli.commands import find_commands
from ingle.cli.reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs/cli.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(find_commands()), "run: make docs"


def test_the_page_has_every_subcommand_and_every_flag() -> None:
    page = PAGE.read_text()
    for command in find_commands():
        assert f"## ingle {command.name}" in page
        for flag in command.flags:
            assert f"`{flag}`" in page
