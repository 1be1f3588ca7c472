"""Kernels without a GPU: numerics in Triton's interpreter, and compilation for every card.

Each gate is a pytest run of its own, because ``TRITON_INTERPRET`` must be set before triton is
imported and the two must never share a process. What fails is in the output of the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_gate(folder: str, marks: str) -> str:
    """Runs the tests of ``folder`` in a process of their own and returns the summary line."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if folder == "interpreted":
        env["TRITON_INTERPRET"] = "1"
    packages = [ROOT / "core", *(ROOT / "plugins" / name for name in ("quant_exl2", "kv_fp8"))]
    sources = [*(package / "src" for package in packages), HERE, HERE / folder]
    env["PYTHONPATH"] = os.pathsep.join([*map(str, sources), env.get("PYTHONPATH", "")])
    env |= {"INGLE_KERNEL_GATE": folder, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += ["--rootdir", str(ROOT), str(HERE / folder)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("folder", ["interpreted", "compiled"])
def test_kernels_pass_the_gate(folder: str) -> None:
    pytest.importorskip("triton")
    assert "passed" in run_gate(folder, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "folder", [pytest.param("interpreted", marks=pytest.mark.long), "compiled"]
)
def test_kernels_pass_the_full_gate(folder: str) -> None:
    pytest.importorskip("triton")
    assert "passed" in run_gate(folder, "slow")
