"""``make demo``: serves a real small model, asks it a question over HTTP, prints the answer."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from serving import HOST, INSTRUCTION, QUESTION, ServingError, ask, serving

EXPECTED = "Paris"


def main() -> int:
    """Runs the demo; 0 when the answer came and names Paris."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=2242)
    port: int = parser.parse_args().port
    if not _is_free(port):
        print(f"Port {port} is busy: stop what listens there (another ingle serve?) and run again.")
        return 1
    try:
        answer = _demo(port)
    except ServingError as error:
        print(error)
        return 1
    if EXPECTED not in answer:
        print(f"\nThat answer does not name {EXPECTED}; something is wrong.")
        return 1
    print("\nThat was streamed. `make serve` keeps a server running for a client of your own.")
    return 0


def _demo(port: int) -> str:
    ingle = str(Path(sys.executable).parent / "ingle")
    print(f"$ ingle serve --port {port}", flush=True)
    with serving([ingle, "serve", "--port", str(port)], port) as seconds:
        print(f"Ready on http://{HOST}:{port}/v1 after {seconds:.1f} s.\n")
        print(f"system: {INSTRUCTION}\nuser: {QUESTION}\nassistant: ", end="", flush=True)
        answer = ask(port, show=lambda piece: print(piece, end="", flush=True))
    print()
    return answer


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
