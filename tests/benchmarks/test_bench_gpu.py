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
    """As a stranger runs it on a machine with torch and triton: by its path, nothing installed."""
    dropped = ("TRITON_INTERPRET", "OUT", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in dropped}
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
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith('{"device": {')]
    report = json.loads(line)
    assert report == json.loads((tmp_path / "bench_gpu.json").read_text())
    assert report["failed"] == []
    assert set(report["sections"]) == {
        "copy", "correctness", "soak", "w4", "exl2", "attention", "step", "peers", "model",
    }  # fmt: skip
    table = lines[lines.index(line) + 2 :]
    assert table[0].split() == ["us", "GB/s", "of", "copy", "tokens/s"]
    named = {row["what"] for rows in report["sections"].values() for row in rows if "us" in row}
    assert named <= {row[:44].strip() for row in table}
    assert table[-2].endswith("results right on interpreter")
    assert table[-1] == "failed: nothing"


OWN = {"ingle", "ingle_quant_exl2", "ingle_kv_fp8"}
WHAT_IT_IMPORTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, triton, triton.language, torch.utils._python_dispatch
before = {name.partition(".")[0] for name in sys.modules}
import bench_gpu
bench_gpu.prepare(interpret=False)
import bench_gpu_sections
after = {
    name.partition(".")[0]
    for name, module in list(sys.modules.items())
    if getattr(module, "__file__", None)  # a stand-in has none
}
print(json.dumps(sorted(after - before - set(sys.stdlib_module_names))))
"""


def test_it_imports_only_torch_and_triton() -> None:
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, "-c", WHAT_IT_IMPORTS, str(SCRIPT.parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = set(json.loads(done.stdout))
    assert {name for name in found if not name.startswith("bench_gpu")} <= OWN
