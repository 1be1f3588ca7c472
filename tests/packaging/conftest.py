"""Wheels of every package, and empty virtual environments to install them into.

An environment gets our wheels through pip, and of the outer environment exactly the distributions
that pip would have installed for them: they are linked, not copied, because three copies of torch
would be minutes and gigabytes. Nothing else of the outer environment is visible inside.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "ingle": "core",
    "ingle-server": "server",
    "ingle-quant-awq": "plugins/quant_awq",
    "ingle-quant-gptq": "plugins/quant_gptq",
    "ingle-quant-exl2": "plugins/quant_exl2",
    "ingle-kv-fp8": "plugins/kv_fp8",
}


@dataclass(frozen=True)
class Environment:
    """A virtual environment with some of our packages."""

    folder: Path

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, away from the checkout."""
        program = self.folder / "bin" / str(words[0])
        return subprocess.run(
            [program, *words[1:]], capture_output=True, text=True, check=False, cwd=self.folder
        )

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Runs ``code``."""
        return self.run("python", "-c", code)

    def plugins(self) -> dict[str, Any]:
        """``ingle plugins --json``, by plugin name."""
        done = self.run("ingle", "plugins", "--json")
        assert done.returncode == 0, done.stderr
        return {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A freshly built wheel of every package, by distribution name."""
    folder = tmp_path_factory.mktemp("dist")
    sources = [str(ROOT / name) for name in FOLDERS.values()]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), *sources]
    subprocess.run(command, check=True)
    built = {path.name.partition("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    assert set(built) == set(FOLDERS)
    return built


@pytest.fixture(scope="session")
def make_environment(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """Makes an environment with the packages named."""

    def make(*names: str) -> Environment:
        folder = tmp_path_factory.mktemp("environment") / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        chosen = [str(wheels[name]) for name in names]
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
        subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", *chosen], check=True)
        linked = folder / "linked"
        linked.mkdir()
        link_distributions(requirements_of(wheels[name] for name in names), linked)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "linked.pth").write_text(f"{linked}\n")
        return Environment(folder)

    return make


def requirements_of(wheels: Iterable[Path]) -> set[str]:
    """Every distribution that pip would install for ``wheels``, ours left out."""
    waiting = [line for wheel in wheels for line in wheel_metadata(wheel).requires_dist or ()]
    found: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name in FOLDERS or not applies(requirement):
            continue
        found.add(name)
        lines = distribution(name).requires or ()
        extras = {*requirement.extras, ""}
        waiting += [r for r in map(Requirement, lines) if any(applies(r, e) for e in extras)]
    return found


def wheel_metadata(wheel: Path) -> Metadata:
    """The METADATA of a wheel."""
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name), validate=False)


def applies(requirement: Requirement, extra: str = "") -> bool:
    """Whether the requirement holds here, with ``extra`` asked for."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def link_distributions(names: Iterable[str], target: Path) -> None:
    """Links the files of installed distributions into ``target``."""
    for name in names:
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            source = Path(str(distribution(name).locate_file(top)))
            if not (target / top).exists():
                (target / top).symlink_to(source)
