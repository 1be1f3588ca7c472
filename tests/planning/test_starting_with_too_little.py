"""``ingle generate`` in a process of its own, with less memory for the cache than it asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CODE = "import sys; from ingle.cli.app import run; sys.exit(run(sys.argv[1:]))"


def generate(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    line = ["generate", str(model), "Hello", "--max-tokens", "2", "--device", "cpu", *flags]
    return subprocess.run(
        [sys.executable, "-c", CODE, *line],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )


@pytest.mark.slow
@pytest.mark.long
def test_what_does_not_fit_stops_with_flags_that_work_or_shrinks_when_told_to(
    demo_model_dir: Path,
) -> None:
    # 22.5 KiB a token: 64 MiB are 2,912 of them, the null block of 256 included.
    wanted = ("--max-model-len", "8k", "--kv-cache-memory-bytes", "64MiB")
    refused = generate(demo_model_dir, *wanted)
    assert refused.returncode == 1
    assert "one sequence of 8192 tokens needs" in refused.stderr
    assert "Traceback" not in refused.stderr
    shorter = re.search(r"--max-model-len (\d+)", refused.stderr)
    larger = re.search(r"--kv-cache-memory-bytes (\w+)", refused.stderr)
    smaller = re.search(r"--kv-cache-dtype (\w+)", refused.stderr)
    assert shorter is not None
    assert larger is not None
    assert smaller is not None
    for flags in (
        ("--max-model-len", shorter[1], *wanted[2:]),
        (*wanted[:2], "--kv-cache-memory-bytes", larger[1]),
        (*wanted, "--kv-cache-dtype", smaller[1]),
        (*wanted, "--on-memory", "shrink"),
    ):
        done = generate(demo_model_dir, *flags)
        assert done.returncode == 0, (flags, done.stderr)
        assert ("SHRUNK TO" in done.stderr) == ("shrink" in flags)
