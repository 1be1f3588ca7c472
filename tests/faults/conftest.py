"""Real servers to be mistreated: one that may be shared, and those that a test may kill."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

from live_server import LiveServer, live_server

HERE = Path(__file__).parent
FLAGS = ("--enforce-eager", "--served-model-name", "demo", "--max-model-len", "2048")


class FaultyServer:
    """A server whose engine does what is ordered at its next step."""

    def __init__(self, server: LiveServer, orders: Path) -> None:
        self.server = server
        self._orders = orders

    def order(self, deed: str) -> None:
        """Has the next step do it; see ``faulty_server.py``."""
        writing = self._orders.with_suffix(".new")
        writing.write_text(deed)
        os.replace(writing, self._orders)

    def is_waiting(self) -> bool:
        """Whether no step has taken the order yet."""
        return self._orders.exists()


@pytest.fixture
def faulty(demo_model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., FaultyServer]]:
    """Starts a server that takes orders, with more flags."""
    orders = tmp_path / "orders"
    program = (HERE / "faulty_server.py", orders)
    with ExitStack() as stack:

        def start(*flags: str) -> FaultyServer:
            words = (demo_model_dir, *FLAGS, *flags)
            server = stack.enter_context(live_server(tmp_path, *words, program=program))
            return FaultyServer(server, orders)

        yield start


@pytest.fixture(scope="session")
def sturdy_server(
    demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A server shared by tests that leave it well, with limits that are quickly reached."""
    limits = ("--max-num-seqs", "4", "--max-queue-len", "4", "--header-timeout", "2")
    folder = tmp_path_factory.mktemp("sturdy")
    with live_server(folder, demo_model_dir, *FLAGS, *limits) as server:
        yield server
