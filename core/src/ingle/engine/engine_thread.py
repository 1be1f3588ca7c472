"""The one thread that owns an engine core: it sleeps on its inbox, steps while there is work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ingle.engine.engine_core import EngineCore
from ingle.engine.release import release_free_pages
from ingle.engine.streams import Mailbox, Stream
from ingle.engine.throughput_log import ThroughputLog
from ingle.errors import EngineDeadError, IngleError
from ingle.request import RequestOutput, SamplingParams

logger = logging.getLogger("ingle.engine")

SHUT_DOWN = "The engine was shut down."
TIDY_SECONDS = 0.25
"""Of idleness after which freed memory goes back to the system: not between two questions of a
script, and before anybody looks how much the server takes."""


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request; its outputs go to the stream."""

    stream: Stream
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None


@dataclass(frozen=True, slots=True)
class Leave:
    """The stream's reader has gone: end its request, tell nobody."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request and tell its reader."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what is there until ``deadline`` (monotonic seconds), then end."""

    deadline: float


Command = Add | Leave | Abort | Stop


class EngineThread:
    """Runs an engine core. Commands come in by a queue, outputs leave through mailboxes.

    Only this thread touches the core's state; everybody else posts commands.

    Args:
        core: The engine.
        on_death: Called in this thread when it ends because of an error.
    """

    def __init__(
        self, core: EngineCore, on_death: Callable[[EngineDeadError], None] | None = None
    ) -> None:
        self._core = core
        self._on_death = on_death
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._streams: dict[str, Stream] = {}  # of unfinished requests; this thread's own
        self._joining: Stream | None = None  # while its request is being added
        self._deadline: float | None = None
        self._lock = threading.Lock()  # between posting and dying
        self._dead: EngineDeadError | None = None
        self._num_posted = 0  # requests ever; under the lock
        self._num_taken = 0  # of them; this thread's own
        self._throughput = ThroughputLog(core)
        self._step_began: float | None = None  # monotonic seconds; None between steps
        self._is_untidy = False  # steps have run since freed memory was given back
        # A daemon: a process that ends without shutting down isn't held up by a long step.
        self._thread = threading.Thread(target=self._run, name="ingle-engine", daemon=True)

    # -- for other threads -----------------------------------------------------------------------

    @property
    def death(self) -> EngineDeadError | None:
        """Why the thread has ended; a new exception each time, for each has its own traceback."""
        return None if self._dead is None else EngineDeadError(*self._dead.args)

    @property
    def step_seconds(self) -> float:
        """How long the step under way has been running; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None or self._dead is not None else time.monotonic() - began

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def num_coming(self) -> int:
        """Requests handed over that the thread, in the middle of a step, has not looked at."""
        return self._num_posted - self._num_taken

    def post(self, command: Command) -> bool:
        """Hands over a command; False when nobody will read it any more."""
        with self._lock:
            if self._dead is None:
                self._num_posted += isinstance(command, Add)
                self._inbox.put(command)
            return self._dead is None

    def join(self, seconds: float | None = None) -> bool:
        """Waits until the thread has ended, if it ever began; ``seconds`` at most.

        Returns:
            Whether it has. A step that does not return keeps it.
        """
        if self._thread.ident is None:
            self._die(EngineDeadError(SHUT_DOWN))
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        cause: EngineDeadError | None = None
        try:
            self._serve()
        except EngineDeadError as error:
            cause = error
        except Exception as error:
            logger.exception("The engine has stopped")
            cause = EngineDeadError(f"The engine has stopped: {type(error).__name__}.")
        finally:
            self._die(cause or EngineDeadError(SHUT_DOWN))
        if cause is not None and self._on_death is not None:
            self._on_death(cause)

    def _serve(self) -> None:
        while not self._is_over():
            self._take_commands()
            if self._core.has_work():
                self._step_began = time.monotonic()
                outputs = self._core.step()
                self._step_began = None
                self._is_untidy = True
                self._deliver(outputs)
                self._throughput.after_step()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return not self._core.has_work() or time.monotonic() >= self._deadline

    def _take_commands(self) -> None:
        if not self._core.has_work():
            self._sleep_until_a_command_comes()
        while not self._inbox.empty():
            self._obey(self._inbox.get())

    def _sleep_until_a_command_comes(self) -> None:
        self._throughput.pause()
        try:
            command = self._inbox.get(timeout=TIDY_SECONDS if self._is_untidy else None)
        except Empty:
            release_free_pages()
            self._is_untidy = False
            command = self._inbox.get()
        self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Leave(stream):
                self._leave(stream)
            case Abort(request_id):
                output = self._core.abort(request_id)
                self._deliver([output] if output is not None else [])
            case Stop(deadline):
                earlier = self._deadline is not None and self._deadline < deadline
                self._deadline = self._deadline if earlier else deadline

    def _add(self, command: Add) -> None:
        stream = self._joining = command.stream
        self._num_taken += 1
        try:
            self._core.add_request(
                stream.request_id, command.prompt_token_ids, command.params, command.prompt
            )
        except IngleError as error:
            stream.mailbox.fail(stream, error)
            stream.mailbox.wake()
        else:
            self._streams[stream.request_id] = stream
        self._joining = None

    def _leave(self, stream: Stream) -> None:
        # By then the id may belong to another request; that one stays.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._core.abort(stream.request_id)
        stream.mailbox.forget(stream)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hands outputs over, waking each event loop once."""
        mailboxes: dict[Mailbox, None] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its reader left after it had ended but before a step said so
            if output.finished:
                del self._streams[output.request_id]
            stream.mailbox.put(stream, output)
            mailboxes[stream.mailbox] = None
        for mailbox in mailboxes:
            if not mailbox.wake():
                self._abandon(mailbox)

    def _abandon(self, mailbox: Mailbox) -> None:
        """Ends the requests of a loop that was closed."""
        for stream in [s for s in self._streams.values() if s.mailbox is mailbox]:
            self._leave(stream)

    def _die(self, error: EngineDeadError) -> None:
        """Tells every reader, those still in the inbox too. From here on ``post`` refuses."""
        with self._lock:
            self._dead = error
        orphans = [*self._streams.values(), *([self._joining] if self._joining else [])]
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, Add):
                orphans.append(command.stream)
        self._streams.clear()
        for stream in orphans:
            stream.mailbox.fail(stream, EngineDeadError(*error.args))
        for mailbox in {stream.mailbox for stream in orphans}:
            mailbox.wake()
        for stream in orphans:
            self._core.abort(stream.request_id)
