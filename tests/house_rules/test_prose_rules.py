"""The documentation names only files, folders and make targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[Path, str]:
    """Every page of prose, by path."""
    paths = [root / name for name in PAGES]
    for pattern in ("docs/**/*.md", "*/README.md", "plugins/*/README.md"):
        paths += root.glob(pattern)
    return {path: path.read_text(encoding="utf-8") for path in paths}


def test_every_link_leads_to_a_file(pages: dict[Path, str]) -> None:
    dead = [
        f"{path.name}: {target}"
        for path, text in pages.items()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert dead == []


def test_every_make_target_named_is_one(pages: dict[Path, str], root: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for text in pages.values()
        for words in re.findall(r"`make ([a-z -]+)`|^make ([a-z -]+?)(?:  |$)", text, re.MULTILINE)
        for target in " ".join(words).split()
    }
    assert named - known == set()


def test_every_source_file_the_architecture_names_exists(root: Path) -> None:
    text = (root / "ARCHITECTURE.md").read_text()
    places = (root, root / "core/src/ingle", root / "server/src")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*[a-z_]+\.py|[a-z_]+/)`", text))
    assert len(named) > 15
    assert {n for n in named if not any((place / n).exists() for place in places)} == set()
