"""The GPU benchmark's script, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_gpu.py")


def run_script(*arguments: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "OUT")}
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    if out is not None:
        env["OUT"] = str(out)
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    pytest.importorskip("triton")
    done = run_script()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_runs_to_the_end_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run_script("--interpret", out=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "bench_gpu.json").read_text())
    assert report["failed"] == []
    assert set(report["sections"]) == {
        "copy", "correctness", "soak", "w4", "exl2", "attention", "step", "peers", "model",
    }  # fmt: skip
