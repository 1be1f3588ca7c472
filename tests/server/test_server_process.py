"""``ingle serve`` as a process: start, port in use, signals, exit codes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PROGRAM = Path(__file__).parent / "server_process.py"
TIMEOUT = 30.0
BODY = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Process:
    """A running ``ingle serve``."""

    def __init__(self, hold: int, *flags: str) -> None:
        command = [sys.executable, str(PROGRAM), str(hold), "--port", "0", *flags]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""

    def wait_until_ready(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)
            found = re.search(r"Ready: (http\S+)/v1", line)
            if found:
                self.url = found[1]
            if line.startswith("Try:"):
                return
        raise AssertionError("".join(self.lines))

    def wait(self) -> int:
        _, rest = self.popen.communicate(timeout=TIMEOUT)
        self.lines.append(rest)
        return self.popen.returncode


@contextmanager
def process(hold: int = 0, *flags: str) -> Iterator[Process]:
    running = Process(hold, *flags)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.popen.kill()
        running.popen.wait(TIMEOUT)
        assert running.popen.stderr is not None
        running.popen.stderr.close()


def test_the_ready_lines_tell_address_memory_and_a_request_to_try() -> None:
    with process() as running:
        text = "".join(running.lines)
        assert re.search(r"serves fake/model with a context of 1024 tokens", text)
        assert re.search(r"Started in \d+\.\d s, resident memory \d+ MiB", text)
        body = re.search(r"-d '(\{.*\})'", text)
        assert body
        url = f"{running.url}/v1/chat/completions"
        assert f"curl {url} " in text
        assert httpx.post(url, json=json.loads(body[1]), timeout=TIMEOUT).status_code == 200
        running.popen.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        assert "Traceback" not in "".join(running.lines)


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, str(PROGRAM), "0", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert "loading" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]])
def test_a_signal_during_a_stream_ends_it_with_an_error_event(
    signals: list[signal.Signals],
) -> None:
    """After ``--shutdown-timeout``, or at the second signal."""
    seconds = "0.2" if len(signals) == 1 else "60"
    with process(3, "--shutdown-timeout", seconds) as running:
        url = f"{running.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=BODY, timeout=TIMEOUT) as response:
            chunks = response.iter_text()
            text = next(chunks)
            for number in signals:
                running.popen.send_signal(number)
            text += "".join(chunks)
        *_, error, done, end = text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        assert (done, end) == ("data: [DONE]", "")
        assert running.wait() == 0


def test_an_open_address_without_a_key_is_warned_of() -> None:
    with process(0, "--host", "0.0.0.0") as running:
        assert "WARNING: 0.0.0.0 is open to the network" in "".join(running.lines)


def test_an_open_address_without_a_key_can_be_refused() -> None:
    command = [sys.executable, str(PROGRAM), "0", "--host", "0.0.0.0", "--require-key"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 2
    assert "--require-key" in done.stderr
    assert "loading" not in done.stderr
