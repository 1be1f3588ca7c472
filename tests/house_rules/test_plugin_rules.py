"""Core names no format, and importing the contract costs nothing."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FORMATS = re.compile(r"awq|gptq|exl[23]|marlin|bitsandbytes", re.IGNORECASE)
KNOWS_ALL_FORMATS = (
    # The conformance kit holds everyone's configs, to test that a format declines the others'.
    "core/src/ingle/testing/",
)
HEAVY = ("torch", "triton", "transformers", "tokenizers", "numpy", "litestar", "jinja2")


def test_core_names_no_format_outside_its_prose(sources: list[Any]) -> None:
    named = [
        line
        for source in sources
        if source.name.startswith("core/") and not source.name.startswith(KNOWS_ALL_FORMATS)
        for line in _formats_named(source)
    ]
    assert named == []


@pytest.mark.parametrize("module", ["ingle", "ingle.plugin", "ingle.config", "ingle.request"])
def test_importing_the_public_modules_loads_nothing_heavy(module: str) -> None:
    assert _heavy_modules(module) == []


def test_every_plugin_module_is_cheap_to_import(packages: list[Path]) -> None:
    modules = sorted(
        target
        for package in packages
        for target in tomllib.loads((package / "pyproject.toml").read_text())["project"]
        .get("entry-points", {})
        .get("ingle.plugins", {})
        .values()
    )
    assert len(modules) == 4
    assert {module: _heavy_modules(module) for module in modules} == {m: [] for m in modules}


def _heavy_modules(module: str) -> list[str]:
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _formats_named(source: Any) -> Iterator[str]:
    prose = _docstring_lines(source.tree)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT or token.start[0] in prose:
            continue
        if FORMATS.search(token.string):
            yield f"{source.name}:{token.start[0]} {token.string[:60]}"


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand alone: docstrings of modules, classes, functions, constants."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines
