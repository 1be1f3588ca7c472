"""Which model is in memory: requests hold it by a lease, and it changes when none does."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ingle import CapacityError, EngineConfig, release_memory
from ingle_server.config import ServerConfig
from ingle_server.engine_client import EngineClient, ModelInfo
from ingle_server.errors import ApiError, StepHungError
from ingle_server.model_entry import ModelEntry, entry_of
from ingle_server.tools.reading import Reading

logger = logging.getLogger("ingle.server")

Progress = Callable[[int, int], None]
Loader = Callable[[EngineConfig, Progress | None], EngineClient]


class LoadedModel:
    """A model in memory.

    Attributes:
        entry: Its names and options.
        engine: What computes.
        reading: How its answers are read.
    """

    def __init__(self, entry: ModelEntry, engine: EngineClient, config: ServerConfig) -> None:
        self.entry = entry
        self.engine = engine
        self.reading = Reading(engine, config)


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody in the queue.

    Attributes:
        wanted: The model wanted; None for whichever there is.
        lease: Resolved with it; to nothing in memory, for those who want it empty.
        forced: Whether it may be swapped in though requests may not do so.
        empties: Wants no model in memory.
        on_progress: Hears of loading.
    """

    wanted: ModelEntry | None
    lease: asyncio.Future[LoadedModel | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    forced: bool = False
    empties: bool = False
    on_progress: Progress | None = None


class ModelManager:
    """Hands out the model in memory, and swaps it between requests.

    One queue, first come, first served: who wants the model that is there gets it at once; who
    wants another one waits until every lease has come back, and everybody behind waits too. After
    a swap, all in the queue who want the new model get it together. So nothing is lost, nobody
    starves, and two models never are in memory at a time.

    For one event loop.

    Args:
        entries: The models; their names are the only keys.
        load: Loads one; called in a thread.
        config: ``allow_inline_model_loading``, ``idle_unload``.
        current: The model in memory at the start.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        load: Loader,
        config: ServerConfig,
        current: LoadedModel | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self._load = load
        self._config = config
        self._current = current
        self._asleep: ModelEntry | None = None  # taken out of memory, to come back when asked for
        self._infos: dict[str, ModelInfo] = {}
        self._queue: deque[_Waiter] = deque()
        self._num_leases = 0
        self._switch: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, engine: EngineClient, config: ServerConfig) -> ModelManager:
        """A manager of one loaded engine, which stays in memory."""
        entry = entry_of(EngineConfig(model=engine.info.name), config.served_model_name)
        loaded = LoadedModel(entry, engine, config)

        def load(_config: EngineConfig, _progress: Progress | None) -> EngineClient:
            return engine

        return cls([entry], load, config, loaded)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def current(self) -> LoadedModel | None:
        """The model in memory."""
        return self._current

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a model."""
        return len(self._queue)

    @property
    def is_switching(self) -> bool:
        """Whether a model is being loaded or taken out of memory."""
        return self._switch is not None

    def find(self, name: str) -> ModelEntry | None:
        """The model of that name. A dictionary's key: no file is looked at."""
        return next((entry for entry in self.entries if entry.accepts(name)), None)

    def info(self, entry: ModelEntry) -> ModelInfo | None:
        """What is known of a model: nothing before it was first loaded."""
        if self._current is not None and self._current.entry is entry:
            return self._current.engine.info
        return self._infos.get(entry.name)

    def check_health(self) -> None:
        """Raises EngineDeadError when the model in memory cannot go on."""
        if self._current is None:
            return
        engine, limit = self._current.engine, self._config.watchdog_seconds
        engine.check_health()
        if limit and engine.step_seconds() > limit:
            raise StepHungError(
                f"A step of the engine has not returned for {limit:g} s (--watchdog-seconds)"
            )

    # -- leases ------------------------------------------------------------------------------------

    async def lease(self, name: str | None = None) -> LoadedModel:
        """The model called ``name`` (or whichever there is), for one request.

        Whoever gets it must call ``release`` once. A name that is not known, or may not be swapped
        in by a request, gets the model that is there; the caller checks its names.

        Raises:
            ApiError: 503 when no model is in memory and none may be loaded, or loading failed.
            CapacityError: Too many wait already.
        """
        wanted = None if name is None else self.find(name)
        loaded = await self._wait(_Waiter(wanted))
        assert loaded is not None
        return loaded

    def hold(self) -> None:
        """Another lease on the model in memory, for a holder of one; ``release`` ends each."""
        self._num_leases += 1

    def release(self) -> None:
        """Gives a lease back."""
        self._num_leases -= 1
        self._advance()

    async def load(self, entry: ModelEntry, on_progress: Progress | None = None) -> None:
        """Brings a model into memory, after the requests that came before.

        Raises:
            ApiError: 500 when it cannot be loaded.
        """
        await self._wait(_Waiter(entry, forced=True, on_progress=on_progress))
        self.release()

    async def unload(self) -> None:
        """Gives the memory back, after the requests that came before."""
        await self._wait(_Waiter(None, empties=True))

    def fail_waiting(self, error: Exception) -> None:
        """Ends everybody's waiting with ``error``."""
        waiting, self._queue = self._queue, deque()
        for waiter in waiting:
            _fail(waiter, error)

    async def shutdown(self, seconds: float) -> bool:
        """Ends the engine, and a load that is under way with it.

        Returns:
            Whether that was done; a load or a step may take longer than ``seconds``.
        """
        self._stop_clock()
        if self._switch is not None:
            await asyncio.wait([self._switch], timeout=seconds)
            if self._switch is not None:
                return False
        return self._current is None or await self._current.engine.shutdown(seconds)

    async def _wait(self, waiter: _Waiter) -> LoadedModel | None:
        limit = self.entries[0].config.max_queue_len
        if len(self._queue) >= limit:
            raise CapacityError(f"{limit} requests are waiting for a model.")
        self._queue.append(waiter)
        self._advance()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: _Waiter) -> None:
        """Takes a waiter that was cancelled out of the queue, or gives its lease back."""
        if waiter in self._queue:
            self._queue.remove(waiter)
            self._advance()
        elif waiter.lease.done() and not waiter.lease.cancelled() and not waiter.empties:
            self.release()

    # -- the queue ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Serves the head of the queue as long as that takes no switch; then begins one."""
        self._stop_clock()
        while self._queue and self._switch is None:
            waiter = self._queue[0]
            target = self._target(waiter)
            if self._is_served_by(waiter, target):
                self._queue.popleft()
                self._grant(waiter)
            elif target is None and not waiter.empties:
                self._queue.popleft()
                _fail(waiter, nothing_loaded())
            elif self._num_leases:
                return
            else:
                self._switch = asyncio.create_task(self._switch_to(target, waiter.on_progress))
        self._start_clock()

    def _target(self, waiter: _Waiter) -> ModelEntry | None:
        """The model that must be in memory for ``waiter``."""
        if waiter.empties:
            return None
        inline = self._config.allow_inline_model_loading
        entry = waiter.wanted
        if entry is not None and (waiter.forced or inline or entry is self._asleep):
            return entry
        return self._current.entry if self._current is not None else self._asleep

    def _is_served_by(self, waiter: _Waiter, target: ModelEntry | None) -> bool:
        current = None if self._current is None else self._current.entry
        return current is target and (target is not None or waiter.empties)

    def _grant(self, waiter: _Waiter) -> None:
        if waiter.lease.done():  # its client has left
            return
        if not waiter.empties:
            self._num_leases += 1
        waiter.lease.set_result(self._current)

    # -- switching ---------------------------------------------------------------------------------

    async def _switch_to(self, target: ModelEntry | None, on_progress: Progress | None) -> None:
        """Empties the memory, loads ``target`` and serves everybody who waits for it."""
        try:
            await self._empty(remember=target is not None)
            if target is not None:
                await self._fill(target, on_progress)
        except Exception:  # a border: whoever waits gets an answer, the log the reason
            logger.exception("%s could not be loaded", "A model" if target is None else target.name)
            self._fail_all_for(target)
        finally:
            self._switch = None
        self._grant_all_for(target)
        self._advance()

    async def _fill(self, target: ModelEntry, on_progress: Progress | None) -> None:
        engine = await asyncio.to_thread(self._load, target.config, on_progress)
        self._current = LoadedModel(target, engine, self._config)
        self._asleep = None
        self._infos[target.name] = engine.info
        logger.info("%s is in memory.", target.name)

    async def _empty(self, *, remember: bool) -> None:
        """Takes the model out of memory; ``remember`` lets the next request bring it back."""
        loaded, self._current = self._current, None
        if loaded is None:
            return
        self._infos[loaded.entry.name] = loaded.engine.info
        self._asleep = loaded.entry if remember else None
        name = loaded.entry.name
        await loaded.engine.shutdown()
        del loaded
        await asyncio.to_thread(release_memory)
        logger.info("%s is out of memory.", name)

    def _grant_all_for(self, target: ModelEntry | None) -> None:
        """Everybody in the queue who is served by the model that has just come."""
        waiting, self._queue = self._queue, deque()
        for waiter in waiting:
            if self._current is not None and self._target(waiter) is target:
                self._grant(waiter)
            else:
                self._queue.append(waiter)

    def _fail_all_for(self, target: ModelEntry | None) -> None:
        waiting, self._queue = self._queue, deque()
        for waiter in waiting:
            if self._target(waiter) is target:
                _fail(waiter, load_failed(target))
            else:
                self._queue.append(waiter)

    # -- idling ------------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        idle = not (self._queue or self._num_leases or self._switch) and self._current is not None
        if idle and self._config.idle_unload:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._config.idle_unload, self._fall_asleep)

    def _stop_clock(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _fall_asleep(self) -> None:
        self._idle_timer = None
        if self._switch is None and self._current is not None and not self._num_leases:
            logger.info("No request for %g s.", self._config.idle_unload)
            self._switch = asyncio.create_task(self._sleep())

    async def _sleep(self) -> None:
        try:
            await self._empty(remember=True)
        finally:
            self._switch = None
        self._advance()


def nothing_loaded() -> ApiError:
    """A 503 for requests while no model is in memory."""
    return ApiError(
        503,
        "No model is loaded; POST /v1/model/load loads one.",
        code="model_not_loaded",
        headers={"retry-after": "5"},
    )


def load_failed(entry: ModelEntry | None) -> ApiError:
    """A 500 for those who waited for a model that cannot be loaded."""
    name = "the model" if entry is None else entry.name
    return ApiError(500, f"Loading {name} failed; the server's log has the reason.")


def _fail(waiter: _Waiter, error: Exception) -> None:
    if not waiter.lease.done():
        waiter.lease.set_exception(error)
