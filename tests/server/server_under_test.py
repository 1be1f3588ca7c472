"""A server on a real socket, in a thread, around a fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from server_fake_engine import FakeEngine

from ingle_server.app import create_service_app
from ingle_server.config import ServerConfig
from ingle_server.http_server import make_http_server
from ingle_server.lifecycle import Lifecycle
from ingle_server.listen import bind
from ingle_server.model_manager import ModelManager
from ingle_server.service import Service

TIMEOUT = 20.0


@dataclass
class Running:
    """A server under test."""

    engine: FakeEngine
    service: Service
    port: int
    loop: asyncio.AbstractEventLoop
    lifecycle: Lifecycle
    exit_codes: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        # Without verify=False every client loads all certificates of the system: 140 ms.
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, verify=False, **options)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)

    def do(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the server's loop."""
        self.loop.call_soon_threadsafe(action)


@contextmanager
def running_server(
    engine: FakeEngine | ModelManager | None = None, **options: Any
) -> Iterator[Running]:
    engine = engine or FakeEngine()
    fakes = FakeEngine() if isinstance(engine, ModelManager) else engine
    config = ServerConfig(port=0, disable_access_log=True, log_level="error", **options)
    sock = bind(config)
    ready = threading.Event()
    box: list[Running] = []

    async def main() -> None:
        service = Service(engine, config)
        http = make_http_server(create_service_app(service), config, ready.set)
        running = Running(
            fakes,
            service,
            sock.getsockname()[1],
            asyncio.get_running_loop(),
            Lifecycle(service, http),
        )
        box.append(running)
        running.exit_codes.append(await running.lifecycle.run([sock]))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(TIMEOUT)
    running = box[0]
    try:
        yield running
    finally:
        if thread.is_alive():
            running.do(engine.release)
            running.do(running.lifecycle.stop)
            running.do(running.lifecycle.stop)
        thread.join(TIMEOUT)
        assert not thread.is_alive()
