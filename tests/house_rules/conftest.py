"""The sources of every package, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file of a package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its path below the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_kernel(self) -> bool:
        """Whether it holds Triton kernels, whose length and parameters are their own business."""
        return self.path.name.endswith("_triton.py") or self.path.name in (
            "kernel.py",
            "triton_read.py",
        )

    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def at(self, node: ast.AST, what: str) -> str:
        """A line for a failure message."""
        return f"{self.name}:{getattr(node, 'lineno', 0)} {what}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def packages(root: Path) -> list[Path]:
    """The folder of every package, core first."""
    return [root / "core", root / "server", *sorted(p.parent for p in root.glob("plugins/*/src"))]


@pytest.fixture(scope="session")
def sources(packages: list[Path]) -> list[Source]:
    """Every Python file under a package's ``src``."""
    paths = sorted(path for package in packages for path in package.glob("src/**/*.py"))
    texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
    return [Source(path, text, ast.parse(text, str(path))) for path, text in texts]
