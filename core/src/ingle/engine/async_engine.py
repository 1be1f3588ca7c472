"""The engine for asyncio: one thread computes, coroutines read streams of outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from functools import cached_property

from ingle.checkpoint.chat_template import ChatTemplate, load_chat_template
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.config import EngineConfig
from ingle.engine.engine_core import EngineCore
from ingle.engine.engine_thread import Abort, Add, EngineThread, Leave, Stop
from ingle.engine.info import EngineInfo
from ingle.engine.metrics import EngineStats
from ingle.engine.passing_thread import run_in_passing_thread
from ingle.engine.streams import Mailbox, Stream
from ingle.errors import CheckpointError, EngineDeadError
from ingle.request import RequestOutput, SamplingParams


class AsyncEngine:
    """Serves many requests at once from one engine thread.

    Example:
        >>> engine = AsyncEngine.from_config(EngineConfig(model="path/to/model"))
        >>> engine.start()
        >>> async for output in engine.generate("a", [1, 2, 3], SamplingParams()):
        ...     print(output.outputs[0].text, end="")
        >>> await engine.shutdown()

    Args:
        core: The engine; from here on it belongs to the engine thread.
        on_death: Called in the engine thread when it ends because of an error.
    """

    def __init__(
        self, core: EngineCore, on_death: Callable[[EngineDeadError], None] | None = None
    ) -> None:
        self._core = core
        self._thread = EngineThread(core, on_death)
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._started = False
        self._draining = False

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        on_death: Callable[[EngineDeadError], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> AsyncEngine:
        """An engine with its model loaded, not yet started. Takes as long as loading takes.

        Args:
            config: What to load and how.
            on_death: Called in the engine thread when it ends because of an error.
            on_progress: Called with (bytes read, bytes in all) while weights are read.

        Raises:
            ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be built.
        """
        from ingle.engine.first_import import import_builder

        build = import_builder()
        return cls(
            run_in_passing_thread(lambda: build(config, on_progress), "ingle-loader"), on_death
        )

    @property
    def info(self) -> EngineInfo:
        """What the engine says about its model; constant."""
        return self._core.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; safe to use from any thread."""
        return self._core.tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template; ``encode`` may be called from any thread.

        Raises:
            CheckpointError: When there is no tokenizer, or its template is damaged.
        """
        tokenizer = self._core.tokenizer
        if tokenizer is None:
            raise CheckpointError(f"{self.info.model} has no tokenizer, so no chat template.")
        return load_chat_template(tokenizer.path, tokenizer)

    @property
    def is_draining(self) -> bool:
        """Whether ``shutdown`` was called: new requests are refused."""
        return self._draining

    def start(self) -> None:
        """Starts the engine thread. Once, before the first request."""
        self._started = True
        self._thread.start()
        for compiler in self._core.compilers:
            compiler.start(lambda: not self._core.has_work())

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new, until the request is finished.

        A reader that is slower than the engine gets several tokens at once. One that leaves
        (closes the iterator, or is cancelled) aborts the request.

        Args:
            request_id: Any name no unfinished request has.
            prompt_token_ids: The prompt's tokens.
            params: How to sample and when to stop.
            prompt: The prompt's text, to be handed back.

        Raises:
            RequestError: At the first step, when the request is wrong.
            CapacityError: At the first step, when too many are waiting.
            EngineDeadError: At any step: the engine has stopped, or was shut down.
        """
        if params.structured is not None:
            await asyncio.to_thread(self.compile_grammar, params)
        stream = self._open(request_id, prompt_token_ids, params, prompt)
        finished = False
        try:
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._leave(stream)

    def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output with finish reason ``"abort"``."""
        self._thread.post(Abort(request_id))

    def check_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises what ``generate`` would raise now, without asking for anything.

        Raises:
            RequestError: When the request is wrong.
            CapacityError: When too many are waiting.
            EngineDeadError: When the engine takes no requests (any more).
        """
        self.check_health()
        if self._draining:
            raise EngineDeadError("The engine is shutting down and takes no more requests.")
        self._core.admission.check(prompt_token_ids, params)
        self._core.check_room(self._thread.num_coming)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the request's grammar, so that a wrong one is known before anything is begun.

        Takes up to seconds: for a thread, not for the event loop.

        Raises:
            RequestError: When it can't be followed.
        """
        self._core.compile_grammar(params)

    def check_health(self) -> None:
        """Raises EngineDeadError unless the engine thread is at work or waiting for some."""
        death = self._thread.death
        if death is not None:
            raise death
        if not self._started:
            raise EngineDeadError("The engine was not started; call start() first.")

    def step_seconds(self) -> float:
        """How long the step under way has been running; 0 between steps."""
        return self._thread.step_seconds

    def stats(self) -> EngineStats:
        """The engine's state now."""
        return self._core.stats()

    async def shutdown(self, drain_timeout: float = 0.0, step_timeout: float | None = None) -> bool:
        """Refuses new requests, lets the others finish for so many seconds, then ends.

        What is unfinished then ends with EngineDeadError. A second call with a shorter time wins.

        Args:
            drain_timeout: Seconds for the requests.
            step_timeout: Seconds more for the step under way, which nothing can interrupt; None
                waits for it.

        Returns:
            Whether the engine has ended. A step that does not return keeps it, and its memory.
        """
        self._draining = True
        self._thread.post(Stop(time.monotonic() + drain_timeout))
        limit = None if step_timeout is None else drain_timeout + step_timeout
        ended = await asyncio.to_thread(self._thread.join, limit)
        if ended:
            for compiler in self._core.compilers:
                await asyncio.to_thread(compiler.stop)
        return ended

    def _open(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None,
    ) -> Stream:
        self.check_request(prompt_token_ids, params)
        stream = Stream(request_id, self._mailbox(asyncio.get_running_loop()))
        if not self._thread.post(Add(stream, prompt_token_ids, params, prompt)):
            self.check_health()  # it died just now, and this says of what
        return stream

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        if loop not in self._mailboxes:
            alive = {known: box for known, box in self._mailboxes.items() if not known.is_closed()}
            self._mailboxes = {**alive, loop: Mailbox(loop)}
        return self._mailboxes[loop]

    def _leave(self, stream: Stream) -> None:
        if not self._thread.post(Leave(stream)):
            stream.mailbox.forget(stream)
