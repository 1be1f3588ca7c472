"""Three hundred mixed hostile requests: no 5xx, nothing held, little memory gained."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_clients import eventually
from hostile_requests import bombard
from live_server import live_server

WARM_UP = 100
GROWTH_BYTES = 64 * 2**20


def resident_bytes(pid: int) -> int:
    """Anonymous resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_300_hostile_requests_leave_the_server_healthy_and_small(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    """Measured from the moment when a hundred others have been answered."""
    flags = ("--enforce-eager", "--max-num-seqs", "64", "--served-model-name", "demo")
    with live_server(tmp_path, demo_model_dir, *flags) as server:
        bombard(server, 1, WARM_UP)
        eventually(server.is_idle, 5)
        before = resident_bytes(server.popen.pid)
        codes = bombard(server, 2, 300)
        assert {code // 100 for code in codes} <= {0, 2, 4}
        assert codes.count(200) > 50
        eventually(server.is_idle, 5)
        assert server.http.get("/health").status_code == 200
        eventually(lambda: resident_bytes(server.popen.pid) - before < GROWTH_BYTES, 5)
        assert "Traceback" not in server.log
