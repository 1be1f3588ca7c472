"""``ingle fit`` in a process of its own: it answers from headers, and nothing in it loads torch,
which alone would take longer than all the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingle.engine.fit_inputs import CARD_FILES, has_card

SCRIPT = """
import sys
from ingle.cli.app import run
code = run(sys.argv[1:])
heavy = [name for name in ("torch", "triton", "transformers", "numpy") if name in sys.modules]
print(f"loaded: {heavy}", file=sys.stderr)
sys.exit(code)
"""
ON_A_4090 = ("--gpu", "RTX 4090", "--max-model-len", "8k")


def fit_alone(*arguments: str, plugins: Path) -> tuple[dict[str, object], str]:
    """What ``ingle fit --json`` says, and what it loaded."""
    path = os.pathsep.join([str(plugins), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "fit", *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("8b", "dense"),
        ("70b-awq", "awq"),
        ("70b-gptq", "gptq"),
        ("70b-exl2", "exl2"),
        ("30b-moe", "dense"),
        ("30b-moe-awq", "awq"),
    ],
)
def test_a_famous_model_is_judged_without_torch(
    model: str, quantization: str, installed_plugins: Path, header_folders: dict[str, Path]
) -> None:
    found, loaded = fit_alone(str(header_folders[model]), *ON_A_4090, plugins=installed_plugins)
    assert found["quantization"] == quantization
    assert loaded == "loaded: []"


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e5m2", "int8", "int4", "k=int8,v=fp8"])
def test_every_cache_format_is_sized_without_torch(
    cache: str, installed_plugins: Path, header_folders: dict[str, Path]
) -> None:
    arguments = (str(header_folders["8b"]), *ON_A_4090, "--kv-cache-dtype", cache)
    found, loaded = fit_alone(*arguments, plugins=installed_plugins)
    # Llama-3-8B: 32 layers, 8 heads of 128 on each side; int8 has a 16-bit scale per head and
    # token, int4 one per 32 values.
    bits = {"auto": 16, "fp8": 8, "fp8_e5m2": 8, "int8": 8.125, "int4": 4.5, "k=int8,v=fp8": 8.0625}
    assert found["kv_cache_bytes_per_token"] == 2 * 32 * 8 * 128 * bits[cache] / 8
    assert loaded == "loaded: []"


def test_this_machine_is_judged_without_torch_where_it_has_no_card(
    demo_model_dir: Path, installed_plugins: Path
) -> None:
    found, loaded = fit_alone(str(demo_model_dir), "--device", "cpu", plugins=installed_plugins)
    assert found["device"] == "this CPU"
    assert loaded == "loaded: []"


def test_a_card_is_looked_for_by_the_files_of_its_driver(tmp_path: Path) -> None:
    assert not has_card(tmp_path)
    for name in CARD_FILES:
        file = tmp_path / name.lstrip("/")
        file.parent.mkdir(exist_ok=True)
        file.touch()
        assert has_card(tmp_path)
        file.unlink()
