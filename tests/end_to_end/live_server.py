"""``ingle serve`` with a real model, as a process of its own.

The entry points that pip would have written lie in a folder of the test's, so that the checkout is
served whether it is installed or not.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_SECONDS = 120.0
STOP_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


class LiveServer:
    """A running server; ``http`` talks to it."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self._log = log
        self.http = httpx.Client(timeout=STOP_SECONDS)

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """The address it said it is ready at."""
        found = re.search(r"Ready: (http\S+)/v1", self.log)
        assert found, self.log
        return found[1]

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rpartition(":")[2])

    def wait_until_ready(self) -> None:
        """Returns at its last ready line."""
        for _ in range(int(START_SECONDS / 0.05)):
            if "Try: curl" in self.log:
                self.http.base_url = httpx.URL(self.url)
                return
            try:
                code = self.popen.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"exit code {code}: {self.log}")
        raise AssertionError(f"not ready: {self.log}")

    def gauges(self) -> dict[str, float]:
        """``/metrics`` as numbers, of the metrics without labels."""
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.split(" ") for line in lines if not line.startswith("#") and "{" not in line]
        return {name: float(value) for name, value in pairs}

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        gauges = self.gauges()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(gauges[f"ingle_{name}"] for name in names)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and gives the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(STOP_SECONDS)


def environment(site: Path, **more: str) -> dict[str, str]:
    """Variables under which this checkout's packages count as installed."""
    folders = [ROOT / "core", ROOT / "server", *sorted((ROOT / "plugins").iterdir())]
    site.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        _describe(site, folder)
    path = [str(site), *(str(folder / "src") for folder in folders), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        **more,
    }


def _describe(site: Path, package: Path) -> None:
    """Writes the package's name and entry points as pip does."""
    text = (package / "pyproject.toml").read_text()
    name = re.findall(r'^name = "(.*)"', text, re.MULTILINE)[0]
    version = re.findall(r'^version = "(.*)"', text, re.MULTILINE)[0]
    tables = re.findall(r'^\[project\.entry-points\."(.*?)"\]\n((?:.+\n)*)', text, re.MULTILINE)
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"[{group}]\n{lines}\n" for group, lines in tables)
    (folder / "entry_points.txt").write_text(points.replace('"', ""))


def command(*arguments: str | Path) -> list[str]:
    """``ingle ARGUMENTS`` as a command."""
    return [sys.executable, "-P", "-m", "ingle", *map(str, arguments)]


@contextmanager
def live_server(
    folder: Path,
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    program: Sequence[str | Path] = (),
) -> Iterator[LiveServer]:
    """A server on a free port, killed afterwards; ``folder`` takes its log and entry points.

    ``program`` is what to run instead of ``ingle``: a script, and arguments before ``serve``.
    """
    env = env or environment(folder / "site")
    log = folder / "server.log"
    words = ["serve", *arguments, "--port", "0"]
    line = [sys.executable, "-P", *map(str, [*program, *words])] if program else command(*words)
    with log.open("wb") as out:
        popen = subprocess.Popen(line, env=env, stdout=out, stderr=out)
    server = LiveServer(popen, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.http.close()
        popen.kill()
        popen.wait(STOP_SECONDS)


def run(
    folder: Path, arguments: Sequence[str | Path], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``ingle ARGUMENTS`` to its end."""
    return subprocess.run(
        command(*arguments),
        env=env or environment(folder / "site"),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
