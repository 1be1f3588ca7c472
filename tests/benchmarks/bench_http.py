"""What the server costs: tokens a second through HTTP streaming beside those of the engine alone.

    make bench-http
    python tests/benchmarks/bench_http.py [MODEL] [--streams 1] [--pairs 5] [--json FILE]

A real server process and an engine in this process, with the same model, take turns; the share is
the server's rate divided by the engine's, pair by pair.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ingle.bench.measure import Measurer
from ingle.bench.streams import Stamps, tokens_per_second
from ingle.cli.session import Session
from ingle.config import EngineConfig
from ingle.demo_model import default_demo_model
from ingle.plugin.cache_folder import default_cache_folder

HOST = "127.0.0.1"
NUM_PROMPT = 128
NUM_OUTPUT = 128
READY_SECONDS = 120.0
SERVE = "import sys; from ingle.cli import main; sys.exit(main())"


@contextmanager
def server(model: str, flags: Sequence[str]) -> Iterator[int]:
    """A server process; gives its port once it answers."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port = int(sock.getsockname()[1])
    line = [sys.executable, "-c", SERVE, "serve", model, "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*line, "--disable-access-log"], stdout=log, stderr=log)
        try:
            _wait(process, port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
            return
        time.sleep(0.1)
    raise SystemExit("The server did not come up.")


def stream(port: int, path: str, body: dict[str, object]) -> Stamps:
    """Posts ``body`` and reads the events; the client does as little as it can meanwhile."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    first = last = 0.0
    count = 0
    with socket.create_connection((HOST, port)) as sock:
        sock.sendall(head.encode() + data)
        while piece := sock.recv(65536):
            if b"data: {" in piece:
                last = time.perf_counter()
                first = first or last
                count += piece.count(b"data: {")
    if count < NUM_OUTPUT // 2:
        raise SystemExit(f"{path}: only {count} events came.")
    return Stamps(first=first, last=last, num_tokens=NUM_OUTPUT)


def through_http(port: int, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second of all prompts streamed at once."""
    gate = threading.Barrier(len(prompts))

    def one(prompt: Sequence[int]) -> Stamps:
        body: dict[str, object] = {
            "model": "bench",
            "prompt": list(prompt),
            "max_tokens": NUM_OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        gate.wait()
        return stream(port, "/v1/completions", body)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return tokens_per_second(list(pool.map(one, prompts)))


def main() -> None:
    """Prints the share and both rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or str(default_demo_model(default_cache_folder()))
    session = Session.open(EngineConfig(model=model, max_model_len=2048))
    if session.core.compiler is not None:
        session.core.compiler.compile_now()
    measurer, draw = Measurer(session.core), random.Random(1)
    vocab_size = session.core.info.vocab_size
    alone, http = [], []
    flags = ("--max-model-len", "2048", "--served-model-name", "bench")
    with server(model, flags) as port:
        for _ in range(options.pairs + 1):
            alone.append(measurer.decode(options.streams, NUM_PROMPT, NUM_OUTPUT))
            prompts = [
                [draw.randrange(vocab_size) for _ in range(NUM_PROMPT)]
                for _ in range(options.streams)
            ]
            http.append(through_http(port, prompts))
    print("engine alone", [round(v, 1) for v in alone], "http", [round(v, 1) for v in http])
    shares = [a / b for a, b in zip(http[1:], alone[1:], strict=True)]
    found = {
        "streams": options.streams,
        "share": statistics.median(shares),
        "share_min": min(shares),
        "share_max": max(shares),
        "http_tokens_per_second": statistics.median(http[1:]),
        "engine_tokens_per_second": statistics.median(alone[1:]),
    }
    print(
        f"{options.streams} stream(s): {found['share']:.3f} of the engine alone "
        f"({found['share_min']:.3f} to {found['share_max']:.3f}); "
        f"{found['http_tokens_per_second']:.1f} and "
        f"{found['engine_tokens_per_second']:.1f} tokens/s"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
