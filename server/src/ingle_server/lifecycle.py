"""How a server lives and ends: signals, draining, the engine's death, the exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from ingle import EngineDeadError
from ingle_server.errors import engine_dead, shutting_down
from ingle_server.http_server import HttpServer
from ingle_server.service import Service

logger = logging.getLogger("ingle.server")

HEALTH_SECONDS = 1.0
"""Between two looks at the engine thread; requests in flight hear of its death at once."""
LAST_WORDS_SECONDS = 3.0
"""How long error events may take to reach clients."""
LAST_STEP_SECONDS = 2.0
"""How long the step under way may take at the very end."""
POLL_SECONDS = 0.05

OK = 0
ENGINE_DIED = 1


class Lifecycle:
    """Runs a server until it is told to stop, or its engine dies.

    SIGTERM or SIGINT: new requests get 503, running ones may finish within ``--shutdown-timeout``,
    the rest end with an error event. A second signal skips the waiting.
    """

    def __init__(self, service: Service, server: HttpServer) -> None:
        self._service = service
        self._server = server
        self._hurry = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._exit_code = OK
        self.is_held_up = False
        """Whether ``run`` is over though a step, or a load, is not: nothing can end it but the end
        of the process."""

    async def run(self, sockets: list[socket.socket]) -> int:
        """Serves on ``sockets``, and gives the process's exit code."""
        watcher = asyncio.create_task(self._watch_engine())
        try:
            await self._server.serve(sockets)
        finally:
            watcher.cancel()
            self.is_held_up = not await self._service.models.shutdown(LAST_STEP_SECONDS)
        return self._exit_code

    def install_signal_handlers(self) -> None:
        """Lets SIGTERM and SIGINT call ``stop``. Only in the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Begins to drain; called again, ends at once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        seconds = self._service.config.shutdown_timeout
        self._service.draining = True
        count = self._service.num_open_requests
        if count:
            logger.warning(
                "Stopping: %d requests may finish within %g s; a second signal stops now.",
                count,
                seconds,
            )
        await self._wait_until_idle(seconds)
        self._service.fail_all(shutting_down())
        await self._end()

    async def _watch_engine(self) -> None:
        limit = self._service.config.watchdog_seconds
        pause = min(HEALTH_SECONDS, limit / 4) if limit else HEALTH_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                self._service.models.check_health()
            except EngineDeadError as error:
                logger.critical("The engine has died; the server exits. %s", error)
                self._exit_code = ENGINE_DIED
                self._service.fail_all(engine_dead(in_flight=True, error=error))
                await self._end()
                return

    async def _end(self) -> None:
        """Gives error events time to leave, then closes the server."""
        self._hurry.clear()
        await self._wait_until_idle(LAST_WORDS_SECONDS)
        self._server.finish()

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._service.num_open_requests and not self._hurry.is_set():
            if asyncio.get_running_loop().time() >= deadline:
                return
            await asyncio.sleep(POLL_SECONDS)
