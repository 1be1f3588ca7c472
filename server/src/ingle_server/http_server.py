"""uvicorn, set up for hostile clients: h11 with small heads, and time limits on sending them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import h11
import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ingle_server.config import ServerConfig
from ingle_server.logs import log_config

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together. Only h11 holds to this; httptools has no limit."""
FLUSH_SECONDS = 5
"""How long closing connections may take to send what they still have."""

TICK_SECONDS = 5.0
"""Age the Date header may reach."""


class PatientProtocol(H11Protocol):
    """h11, but a client that opens a connection or begins a request must finish its headers in
    time. uvicorn itself limits only the pause between two requests."""

    header_timeout: float = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock."""
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """Lets the clock run on until the headers are there; the body has its own limit."""
        clock = self.timeout_keep_alive_task
        started = clock is not None and self.conn.trailing_data[0] != b""
        if started:
            self.timeout_keep_alive_task = None  # out of reach of what stops it below
        super().data_received(data)
        waits_for_head = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if started and clock is not None:
            if waits_for_head:
                self.timeout_keep_alive_task = clock
            else:
                clock.cancel()
        elif waits_for_head and self.timeout_keep_alive_task is None:
            self._start_clock()

    def _start_clock(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.header_timeout, self.timeout_keep_alive_handler
        )


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would drop every reply at the first SIGTERM."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._finished = asyncio.Event()

    def finish(self) -> None:
        """Ends ``serve``."""
        self.should_exit = True
        self._finished.set()

    async def main_loop(self) -> None:
        """Wakes now and then, for the Date header; uvicorn's own does so ten times a second, which
        an idle machine would notice."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._finished.wait()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begins to accept, and says so."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals alone."""
        yield


def make_http_server(
    app: ASGIApp, config: ServerConfig, on_ready: Callable[[], None] = lambda: None
) -> HttpServer:
    """A server for ``app``; its ``serve`` takes the bound sockets."""
    protocol = type("Protocol", (PatientProtocol,), {"header_timeout": config.header_timeout})
    return HttpServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=config.timeout_keep_alive,  # type: ignore[arg-type]  # a float is fine
            timeout_graceful_shutdown=FLUSH_SECONDS,
            root_path=config.root_path,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            log_config=log_config(config.log_level),
            access_log=not config.disable_access_log,
            server_header=False,
            proxy_headers=False,
        ),
        on_ready,
    )
