"""Core alone, core with one plugin, and everything, each in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HELP_WITHOUT_TORCH = (
    "import sys; from ingle.cli import main; main(['serve', '--help']); main(['--help']);"
    "sys.exit('torch' in sys.modules or 'litestar' in sys.modules)"
)

PLUGINS = {"awq", "gptq", "exl2", "kv_fp8"}


def test_every_wheel_carries_its_licence_and_type_marker(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        names = zipfile.ZipFile(wheel).namelist()
        assert any(entry.endswith("/licenses/LICENSE") for entry in names), name
        assert any(entry.endswith("/py.typed") for entry in names), name
        assert not any("test" in entry.split("/")[0] for entry in names), name


def installed_plugins(environment: Any) -> set[str]:
    """Names of the plugins that are not part of core."""
    plugins = environment.plugins().items()
    return {name for name, plugin in plugins if not plugin["builtin"]}


def test_core_alone_runs_a_model_without_server_plugins_or_triton(
    make_environment: Callable[..., Any], tmp_path: Path
) -> None:
    environment = make_environment("ingle")
    assert installed_plugins(environment) == set()
    for module in ("ingle_server", "ingle_quant_awq", "litestar", "triton"):
        assert "ModuleNotFoundError" in environment.python(f"import {module}").stderr
    served = environment.run("ingle", "serve")
    assert (served.returncode, served.stdout) == (2, "")
    assert "pip install ingle-server" in served.stderr
    ingle = Path(sys.executable).parent / "ingle"
    subprocess.run([ingle, "demo-model", tmp_path / "demo"], check=True)
    done = environment.run(
        "ingle", "generate", tmp_path / "demo", "The capital of France is",
        "--max-tokens", "4", "--temperature", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_core_with_one_plugin_has_that_plugin_only(make_environment: Callable[..., Any]) -> None:
    environment = make_environment("ingle", "ingle-quant-awq")
    plugins = environment.plugins()
    assert installed_plugins(environment) == {"awq"}
    assert plugins["awq"]["distribution"] == "ingle-quant-awq"
    assert plugins["awq"]["status"] == "ok", plugins["awq"]
    assert "awq" in plugins["awq"]["weight_formats"]


def test_everything_together_works_and_its_metadata_agrees(
    make_environment: Callable[..., Any], wheels: dict[str, Path]
) -> None:
    environment = make_environment(*wheels)
    plugins = environment.plugins()
    assert installed_plugins(environment) == PLUGINS
    assert {name: p["reason"] for name, p in plugins.items() if p["status"] != "ok"} == {}
    helped = environment.run("ingle", "serve", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--max-model-len" in helped.stdout
    assert environment.python(HELP_WITHOUT_TORCH).returncode == 0
    python = environment.folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "check"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_extra_all_names_every_package(wheels: dict[str, Path]) -> None:
    from packaging.requirements import Requirement

    archive = zipfile.ZipFile(wheels["ingle"])
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    lines = archive.read(name).decode().splitlines()
    requirements = [Requirement(x.partition(": ")[2]) for x in lines if x.startswith("Requires-D")]
    in_all = {
        r.name for r in requirements if r.marker and "'all'" in str(r.marker).replace('"', "'")
    }
    assert in_all == set(wheels) - {"ingle"}
