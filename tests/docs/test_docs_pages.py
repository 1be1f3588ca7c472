"""The documentation: it builds, and what it says of flags and messages is so."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingle.cli.retired import RETIRED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    home = (tmp_path / "index.html").read_text()
    assert "https://fonts" not in home
    assert (tmp_path / "decisions" / "index.html").exists()


def test_every_link_of_the_built_site_leads_somewhere(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=120)
    dead = []
    for page in tmp_path.rglob("*.html"):
        if page.name == "404.html":  # its links are from the site's root
            continue
        text = page.read_text()
        for target in re.findall(r'(?:href|src)="([^"]*)"', text):
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:|//", path):
                continue
            there = (page.parent / path).resolve() if path else page
            if there.is_dir():
                there /= "index.html"
            found = there.exists()
            if found and anchor and there.suffix == ".html":
                found = f'id="{anchor}"' in there.read_text() or anchor == "__skip"
            if not found:
                dead.append(f"{page.relative_to(tmp_path)}: {target}")
    assert dead == []


def test_the_pictures_are_those_of_the_tables(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/pictures.py", tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert drawn == kept, "run: make docs"


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"`(--[a-z0-9-]+)`", text))


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_moving_from_aphrodite_names_every_flag_and_its_fate() -> None:
    page = sections("from_aphrodite.md")
    known = flags_of((DOCS / "cli.md").read_text().split("## Flags of vLLM")[0])
    assert flags_of(page["The same"]) - known == set()
    named = flags_of(page["Another name"]) | flags_of(page["Accepted, and not needed"])
    assert {flag for flag in RETIRED if flag not in named} == set()
    for flag, retired in RETIRED.items():
        if not retired.becomes:
            assert f"`{flag}` | {retired.note}" in page["Accepted, and not needed"]
    missing = flags_of(page["Not there: an error, not a surprise"].split("| flag |")[1])
    one_value = {"--tensor-parallel-size", "--pipeline-parallel-size"}
    refused = flags_of((DOCS / "cli.md").read_text().split("that are refused")[1])
    assert missing - refused <= one_value
    assert missing & refused


@pytest.fixture(scope="module")
def strings() -> str:
    """Every string constant of the packages, joined."""
    found = []
    for path in (*ROOT.glob("*/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                pieces = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                found.append("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_troubleshooting_quotes_messages_that_exist(strings: str) -> None:
    """Capitals, single digits' places and dots stand for what varies; the rest must be there."""
    rows = re.findall(r"^\| (`.*?|\d{3}, .*?) \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    assert len(spans) > 30
    missing = []
    for span in spans:
        pieces = re.split(r"\b[A-Z]{1,}\b|'X'|…|:", span)
        words = [piece.strip(" '") for piece in pieces]
        missing += [w for w in words if len(w) > 3 and w not in strings and not w.startswith("--")]
    assert missing == []
