"""What every route shares: the engine, the options, the names served, the requests in flight."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import PurePath
from typing import TypeVar

from ingle import EngineDeadError, SamplingParams
from ingle_server.config import ServerConfig
from ingle_server.engine_client import EngineClient
from ingle_server.errors import ApiError, engine_dead, shorten
from ingle_server.flight import Flight, Prompt
from ingle_server.metrics import Metrics
from ingle_server.responses.store import ResponseStore
from ingle_server.tools.reading import Reading

T = TypeVar("T")

INLINE_CHARS = 8192
"""Text up to this long is tokenised on the event loop: about as long as a thread's round trip."""


class Service:
    """One running server's state.

    Attributes:
        draining: Set once the server has been told to stop.
        num_open_requests: HTTP requests being answered.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.reading = Reading(engine, config)
        self.responses = ResponseStore()
        self.started = int(time.time())
        self.draining = False
        self.num_open_requests = 0
        self.names = served_names(config, engine.info.name)
        also = () if config.served_model_name else (engine.info.name,)
        self._accepted = frozenset({*self.names, *also})
        self._flights: set[Flight] = set()

    @property
    def num_flights(self) -> int:
        """Requests that are generating."""
        return len(self._flights)

    def check_model(self, name: str) -> None:
        """Refuses names that are not served. A name is a dictionary key here, never a path.

        Raises:
            ApiError: 404.
        """
        if name not in self._accepted:
            raise ApiError(
                404,
                f"The model `{shorten(name)}` does not exist; served is `{self.names[0]}`.",
                param="model",
                code="model_not_found",
            )

    def check_alive(self) -> None:
        """Refuses new work when there is no engine to do it.

        Raises:
            ApiError: 503.
        """
        try:
            self.engine.check_health()
        except EngineDeadError:
            raise engine_dead(in_flight=False) from None

    def take_off(self, prefix: str, prompts: list[Prompt], params: SamplingParams) -> Flight:
        """Starts generating; the caller must ``land`` the flight however it ends."""
        flight = Flight(f"{prefix}-{uuid.uuid4().hex}", prompts, params)
        self._flights.add(flight)
        flight.start(self.engine)
        return flight

    def land(self, flight: Flight) -> None:
        """Aborts what still runs of ``flight`` and forgets it."""
        flight.close()
        self._flights.discard(flight)

    def fail_all(self, error: Exception) -> None:
        """Ends every request in flight with ``error``."""
        for flight in tuple(self._flights):
            flight.fail(error)

    async def off_loop(self, num_chars: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on ``num_chars`` of text: in a thread when that may take a while."""
        return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """Names shown to clients: the operator's, or the hub id, or a folder's last part.

    A whole folder path would tell strangers about this machine; it is understood, but not shown.
    """
    if config.served_model_name:
        return config.served_model_name
    is_folder = model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model
    return (PurePath(model).name or model,) if is_folder else (model,)
