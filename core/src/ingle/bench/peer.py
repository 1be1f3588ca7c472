"""Another engine, seen from the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from ingle.errors import ConfigError

PEERS: Final = ("llama.cpp", "vllm")
"""What ``--compare`` knows."""
STOP_SECONDS: Final = 10.0


class Peer(Protocol):
    """Another engine with the same model, which runs only while it is asked something."""

    name: str

    def start(self) -> float:
        """Loads the model; seconds from the start of its process until it answers.

        Raises:
            ConfigError: When it cannot be run.
        """
        ...

    def decode(self, batch: int, num_prompt: int, num_output: int) -> float:
        """As ``Measurer.decode``."""
        ...

    def prefill(self, num_tokens: int) -> float:
        """Tokens a second of a prompt of ``num_tokens``."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


def parse_compare(values: Sequence[str]) -> dict[str, Path]:
    """Peers by name, from ``llama.cpp=PATH`` and ``vllm=PYTHON``.

    Raises:
        ConfigError: For an unknown peer, or a path where nothing is.
    """
    peers: dict[str, Path] = {}
    for value in values:
        name, _, path = value.partition("=")
        if name not in PEERS or not path:
            raise ConfigError(
                "--compare must be llama.cpp=PATH (the folder of llama-bench and llama-server) or "
                f"vllm=PYTHON (the interpreter that has vllm), got {value!r}."
            )
        if not Path(path).exists():
            raise ConfigError(f"--compare {value}: {path} does not exist.")
        peers[name] = Path(path)
    return peers


class PausedProcess:
    """A process that is stopped (SIGSTOP) but while it is used, so that it takes no processor
    time from what is measured beside it.

    Args:
        line: The command.
        what: Its name in errors.
        log: Where its output goes.
        talks: Whether its standard output is read instead.
    """

    def __init__(self, line: Sequence[str], what: str, log: Path, *, talks: bool = False) -> None:
        self._what = what
        self._log = log
        with log.open("wb") as sink:
            try:
                self.process = subprocess.Popen(
                    line,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if talks else sink,
                    stderr=sink,
                    start_new_session=True,  # a group of its own, with whatever it starts
                )
            except OSError as error:
                raise ConfigError(f"{what} cannot be run: {error}") from error

    def __enter__(self) -> PausedProcess:
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGSTOP)

    def failed(self) -> ConfigError:
        """An error that quotes its last words."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return ConfigError(f"{self._what} has ended: {' / '.join(lines[-3:]) or 'no word'}")

    def close(self) -> None:
        """Ends it with all it has started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
