"""``make demo``: serves a real small model, asks it a question over HTTP, prints the answer."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from serving import HOST, INSTRUCTION, QUESTION, ServingError, ask, serving

from ingle.demo_model import default_demo_model
from ingle.demo_model.locate import LAYOUT_VERSION
from ingle.errors import IngleError
from ingle.plugin.cache_folder import default_cache_folder
from ingle.quantize import quantize

EXPECTED = "Paris"


def main() -> int:
    """Runs the demo; 0 when the answer came and names Paris."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=2242)
    parser.add_argument("--format", default="", help="serve a quant of this format, made once")
    arguments = parser.parse_args()
    port: int = arguments.port
    if not _is_free(port):
        print(f"Port {port} is busy: stop what listens there (another ingle serve?) and run again.")
        return 1
    try:
        answer = _demo(port, _quant(arguments.format) if arguments.format else None)
    except (ServingError, IngleError) as error:
        print(error)
        return 1
    # A quant of a model this small may lose the answer and still be what it should be.
    if arguments.format:
        return 0 if answer.strip() else 1
    if EXPECTED not in answer:
        print(f"\nThat answer does not name {EXPECTED}; something is wrong.")
        return 1
    print("\nThat was streamed. `make serve` keeps a server running for a client of your own.")
    return 0


def _quant(form: str) -> Path:
    """The demo model in a format: made once, kept in the cache folder, finished if cut off. A later
    version of the demo model has quants of its own, for none can be finished from another model."""
    cache = default_cache_folder()
    out = cache / "quants" / f"demo-{LAYOUT_VERSION}-{form}"
    # The state folder goes last: with it there, the card and its measurement are missing.
    if not (out / "config.json").is_file() or (out / ".quantize").exists():
        model = default_demo_model(cache)
        options = {} if form == "exl2" else {"group_size": 64}
        print(f"Making {out} (once; minutes).", flush=True)
        quantize(str(model), out, format=form, **options)
    return out


def _demo(port: int, model: Path | None) -> str:
    ingle = str(Path(sys.executable).parent / "ingle")
    command = ["serve", *([] if model is None else [str(model)]), "--port", str(port)]
    print("$ ingle", *command, flush=True)
    with serving([ingle, *command], port) as seconds:
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
