"""Each folder is one package; all state the same version, licence and ranges, and what they use."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

DISTRIBUTION_OF = {
    "docstring_parser": "docstring-parser",
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
}
ONLY_WITH_AN_EXTRA = {"triton", "pytest", "hypothesis", "pyarrow"}


def test_every_package_states_version_licence_python_and_readme(packages: list[Path]) -> None:
    together = _project(packages[0])["version"]  # tools/release.py stamps them all
    for package in packages:
        project = _project(package)
        assert project["version"] == together, package
        assert project["license"] == "Apache-2.0", package
        assert project["requires-python"] == ">=3.11", package
        assert project["readme"] == "README.md", package
        assert (package / "README.md").is_file(), package
        assert (package / "LICENSE").is_file(), package
        assert [*package.glob("src/*/py.typed")], package


def test_the_version_of_core_is_the_one_it_prints(packages: list[Path], root: Path) -> None:
    text = (root / "core/src/ingle/__init__.py").read_text()
    assert f'__version__ = "{_project(packages[0])["version"]}"' in text


def test_every_other_package_takes_a_range_of_core(packages: list[Path]) -> None:
    for package in packages[1:]:
        ranges = [r.specifier for r in _requirements(package) if r.name == "ingle"]
        assert [str(r) for r in ranges] == ["<0.2,>=0.1"], package


def test_no_package_pins_a_version(packages: list[Path]) -> None:
    pins = [str(r) for p in packages for r in _requirements(p) if "==" in str(r.specifier)]
    assert pins == []


def test_every_requirement_has_a_pin_for_ci(packages: list[Path], root: Path) -> None:
    lines = (root / "constraints.txt").read_text().splitlines()
    pinned = {_canonical(line.partition("==")[0]) for line in lines if "==" in line}
    wanted = {_canonical(r.name) for package in packages for r in _requirements(package)}
    assert {name for name in wanted - pinned if not name.startswith("ingle")} == set()


def test_every_requirement_is_imported_and_every_import_is_required(
    packages: list[Path], sources: list[Any]
) -> None:
    for package in packages:
        mine = [source for source in sources if source.path.is_relative_to(package)]
        used = {name for source in mine for name in _imported(source.tree)}
        used -= {_canonical(path.name) for path in package.glob("src/*")}
        wanted = {_canonical(r.name) for r in _requirements(package)}
        assert used - wanted - ONLY_WITH_AN_EXTRA == set(), f"{package.name} does not require these"
        assert wanted - used == set(), f"{package.name} requires these and never imports them"


def test_every_requirement_has_its_decision_written_down(packages: list[Path], root: Path) -> None:
    decisions = " ".join(p.read_text() for p in root.glob("docs/decisions/*.md")).lower()
    wanted = {r.name.lower() for package in packages for r in _requirements(package)}
    unexplained = {n for n in wanted if n not in decisions and n.replace("_", "-") not in decisions}
    assert unexplained == set()


def test_no_two_test_files_share_a_name(root: Path) -> None:
    """``--import-mode=importlib`` tells test modules apart by path, people by name."""
    tests = [p for p in root.glob("**/test_*.py") if ".venv" not in p.parts]
    assert [name for name, count in Counter(p.name for p in tests).items() if count > 1] == []


def _project(package: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return project


def _requirements(package: Path) -> list[Requirement]:
    return [Requirement(line) for line in _project(package).get("dependencies", [])]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(tree: ast.Module) -> Iterator[str]:
    """Distributions imported anywhere in the module, for types or for real."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names:
                yield _canonical(DISTRIBUTION_OF.get(top, top))
