"""What every route shares: the models, the options, the names served, the requests in flight."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ingle import EngineDeadError, SamplingParams
from ingle_server.config import ServerConfig
from ingle_server.engine_client import EngineClient
from ingle_server.errors import ApiError, engine_dead, shorten
from ingle_server.flight import Flight, Prompt
from ingle_server.kobold.generations import Generations
from ingle_server.metrics import Metrics
from ingle_server.model_manager import LoadedModel, ModelManager, nothing_loaded
from ingle_server.responses.store import ResponseStore
from ingle_server.tools.reading import Reading

T = TypeVar("T")

INLINE_CHARS = 8192
"""Text up to this long is tokenised on the event loop: about as long as a thread's round trip."""


@dataclass(slots=True)
class _Shared:
    """What all views of one server share."""

    models: ModelManager
    metrics: Metrics
    started: int
    draining: bool = False
    num_open_requests: int = 0
    flights: set[Flight] = field(default_factory=set)
    responses: ResponseStore = field(default_factory=ResponseStore)
    generations: Generations = field(default_factory=Generations)


class Service:
    """One running server's state; a view of it bound to a model is what a request works with.

    Args:
        engine: The models, or the one engine there is.
        config: The server's options.
    """

    def __init__(self, engine: EngineClient | ModelManager, config: ServerConfig) -> None:
        models = engine if isinstance(engine, ModelManager) else ModelManager.of(engine, config)
        self.config = config
        self._shared = _Shared(models, Metrics(models), int(time.time()))
        self._loaded: LoadedModel | None = None

    def bound(self, loaded: LoadedModel) -> Service:
        """The same server, for a request that has leased ``loaded``."""
        view = Service.__new__(Service)
        view.config = self.config
        view._shared = self._shared
        view._loaded = loaded
        return view

    @property
    def models(self) -> ModelManager:
        """Every model, and the one in memory."""
        return self._shared.models

    @property
    def metrics(self) -> Metrics:
        """What Prometheus reads."""
        return self._shared.metrics

    @property
    def responses(self) -> ResponseStore:
        """Answers kept for ``/v1/responses``."""
        return self._shared.responses

    @property
    def generations(self) -> Generations:
        """Kobold's, which can be looked at by key."""
        return self._shared.generations

    @property
    def started(self) -> int:
        """When the server began, in Unix seconds."""
        return self._shared.started

    @property
    def draining(self) -> bool:
        """Whether the server has been told to stop."""
        return self._shared.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._shared.draining = value

    @property
    def num_open_requests(self) -> int:
        """HTTP requests being answered."""
        return self._shared.num_open_requests

    @num_open_requests.setter
    def num_open_requests(self, value: int) -> None:
        self._shared.num_open_requests = value

    @property
    def loaded(self) -> LoadedModel:
        """The request's model; outside of requests the one in memory.

        Raises:
            ApiError: 503 when there is none.
        """
        loaded = self._loaded or self.models.current
        if loaded is None:
            raise nothing_loaded()
        return loaded

    @property
    def engine(self) -> EngineClient:
        """What computes; see ``loaded``."""
        return self.loaded.engine

    @property
    def reading(self) -> Reading:
        """How the model's answers are read; see ``loaded``."""
        return self.loaded.reading

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in hand, or of the one that would be loaded first."""
        loaded = self._loaded or self.models.current
        return self.models.entries[0].names if loaded is None else loaded.entry.names

    @property
    def num_flights(self) -> int:
        """Requests that are generating."""
        return len(self._shared.flights)

    def check_model(self, name: str) -> None:
        """Refuses names that are not served. A name is a dictionary key here, never a path.

        Raises:
            ApiError: 404.
        """
        if self.loaded.entry.accepts(name):
            return
        hint = f"served is `{self.names[0]}`"
        if self.models.find(name) is not None:
            hint = (
                f"it is not loaded ({hint}); POST /v1/model/load loads it, or start the server "
                "with --allow-inline-model-loading"
            )
            raise ApiError(
                404, f"The model `{name}`: {hint}.", param="model", code="model_not_found"
            )
        raise ApiError(
            404,
            f"The model `{shorten(name)}` does not exist; {hint}.",
            param="model",
            code="model_not_found",
        )

    def check_alive(self) -> None:
        """Refuses new work when there is no engine to do it.

        Raises:
            ApiError: 503.
        """
        try:
            self.models.check_health()
        except EngineDeadError as error:
            raise engine_dead(in_flight=False, error=error) from None

    def take_off(self, prefix: str, prompts: list[Prompt], params: SamplingParams) -> Flight:
        """Starts generating; the caller must ``land`` the flight however it ends.

        Until then it holds its model, even when its request's answer is out (in the background).
        """
        flight = Flight(f"{prefix}-{uuid.uuid4().hex}", prompts, params)
        self._shared.flights.add(flight)
        self.models.hold()
        flight.start(self.engine)
        return flight

    def land(self, flight: Flight) -> None:
        """Aborts what still runs of ``flight`` and forgets it."""
        flight.close()
        if flight in self._shared.flights:
            self._shared.flights.discard(flight)
            self.models.release()

    def fail_all(self, error: Exception) -> None:
        """Ends every request in flight, and those that wait for a model, with ``error``."""
        self.models.fail_waiting(error)
        for flight in tuple(self._shared.flights):
            flight.fail(error)

    async def off_loop(self, num_chars: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on ``num_chars`` of text: in a thread when that may take a while."""
        return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
