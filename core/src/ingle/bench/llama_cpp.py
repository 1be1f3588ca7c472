"""llama.cpp beside Ingle: ``llama-bench`` for one sequence, ``llama-server`` for several.

Flags and output as of build b11434.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingle.bench.peer import PausedProcess
from ingle.bench.streams import Address, together, tokens_per_second
from ingle.errors import ConfigError

READY_SECONDS: Final = 120.0
LEAST_TOKEN: Final = 100
MOST_TOKEN: Final = 20_000
"""Random prompts are made of tokens between these: no control tokens, in every vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSetting:
    """How llama.cpp is run.

    Attributes:
        folder: Where its programs are.
        gguf: The model.
        threads: For computing.
        streams: Sequences that its server can decode together.
        context: Tokens of each.
        log: File for its messages.
    """

    folder: Path
    gguf: Path
    threads: int
    streams: int
    context: int
    log: Path


class LlamaCpp:
    """llama.cpp as a ``Peer``."""

    name = "llama.cpp"

    def __init__(self, setting: LlamaSetting) -> None:
        self._setting = setting
        self._server: PausedProcess | None = None
        self._address = Address(host="127.0.0.1", port=0, path="/completion")
        self._draw = random.Random(0)

    def start(self) -> float:
        """Starts the server."""
        setting, port = self._setting, _free_port()
        line = [str(_program(setting.folder, "llama-server")), "-m", str(setting.gguf)]
        line += ["-t", str(setting.threads), "-np", str(setting.streams)]
        line += ["-c", str(setting.streams * setting.context)]
        line += ["--host", "127.0.0.1", "--port", str(port)]
        begun = time.perf_counter()
        self._server = PausedProcess(line, "llama-server", setting.log)
        self._address = Address(host="127.0.0.1", port=port, path="/completion")
        with self._server as server:
            while not _answers(port):
                if server.process.poll() is not None:
                    raise server.failed()
                if time.perf_counter() - begun > READY_SECONDS:
                    raise ConfigError(f"llama-server was not ready in {READY_SECONDS:.0f} s.")
                time.sleep(0.01)
            return time.perf_counter() - begun

    def decode(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Tokens a second, all sequences together."""
        if batch == 1:
            return self._bench("-p", "0", "-n", str(num_output), "-d", str(num_prompt))
        bodies = [
            {
                "prompt": [
                    self._draw.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(num_prompt)
                ],
                "n_predict": num_output,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
            }
            for _ in range(batch)
        ]
        assert self._server is not None
        with self._server:
            return tokens_per_second(together(self._address, bodies, num_output))

    def prefill(self, num_tokens: int) -> float:
        """Tokens a second."""
        return self._bench("-p", str(num_tokens), "-n", "0")

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()

    def _bench(self, *flags: str) -> float:
        setting = self._setting
        line = [str(_program(setting.folder, "llama-bench")), "-m", str(setting.gguf)]
        line += ["-t", str(setting.threads), "-r", "1", "-o", "json", *flags]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        try:
            return float(json.loads(done.stdout)[0]["avg_ts"])
        except (ValueError, LookupError, TypeError):
            last = done.stderr.strip().splitlines()[-1:]
            raise ConfigError(
                f"llama-bench gave no figure: {''.join(last) or done.stdout!r}"
            ) from None


def find_gguf(model: Path, given: str | None) -> Path:
    """The GGUF file of the same weights: the one that was given, or the one in the model's folder.

    Raises:
        ConfigError: When there is none, or no telling which.
    """
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise ConfigError(f"--compare-model {given}: there is no such file.")
        return path
    found = [model] if model.suffix == ".gguf" else sorted(model.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            f"llama.cpp needs the same weights as GGUF, and {model} holds {len(found)} such files. "
            "Name one with --compare-model FILE.gguf. To make one: `convert_hf_to_gguf.py "
            f"{model} --outfile F16.gguf --outtype f16`, and for 4 bits `llama-quantize F16.gguf "
            "Q4_0.gguf Q4_0`."
        )
    return found[0]


def _program(folder: Path, name: str) -> Path:
    """``name`` in the folder, in its ``bin``, or beside the program that was named."""
    base = folder.parent if folder.is_file() else folder
    for path in (base / name, base / "bin" / name, base / "build" / "bin" / name):
        if path.is_file():
            return path
    raise ConfigError(f"--compare llama.cpp={folder}: there is no {name} in it.")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
