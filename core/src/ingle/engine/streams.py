"""How outputs travel from the engine thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import threading

from ingle.errors import IngleError
from ingle.request import CompletionOutput, RequestOutput


class Stream:
    """One request's outputs, read in one event loop."""

    def __init__(self, request_id: str, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> RequestOutput:
        """What is new since the last call, merged into one output; waits until there is anything.

        Raises:
            IngleError: The request, or the engine, failed; what came before was read first.
        """
        while True:
            output = self.mailbox.take(self)
            if output is not None:
                return output
            # Between the look and this line nothing runs in the loop, so no notice is missed.
            self._waiter = self.mailbox.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def notify(self) -> None:
        """Wakes the reader. Only in the reader's loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Mailbox:
    """Outputs on their way into one event loop.

    The engine thread puts outputs in, and wakes the loop at most once until the loop has looked.
    Outputs of a slow reader merge, so what is kept is never more than the text itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._outputs: dict[Stream, RequestOutput] = {}
        self._errors: dict[Stream, IngleError] = {}
        self._awake = False

    def put(self, stream: Stream, output: RequestOutput) -> None:
        """Adds an output; ``wake`` delivers it."""
        with self._lock:
            waiting = self._outputs.get(stream)
            if waiting is None:
                self._outputs[stream] = output
            else:
                merge_output(waiting, output)

    def fail(self, stream: Stream, error: IngleError) -> None:
        """Ends a stream with an error; ``wake`` delivers it."""
        with self._lock:
            self._errors[stream] = error

    def take(self, stream: Stream) -> RequestOutput | None:
        """The stream's output, if there is one. Raises the error that comes after the last."""
        with self._lock:
            output = self._outputs.pop(stream, None)
            if output is None and stream in self._errors:
                raise self._errors.pop(stream)
            return output

    def forget(self, stream: Stream) -> None:
        """Drops what nobody will read."""
        with self._lock:
            self._outputs.pop(stream, None)
            self._errors.pop(stream, None)

    def wake(self) -> bool:
        """Has the loop notify its readers; False when the loop is closed."""
        with self._lock:
            if self._awake:
                return True
            self._awake = True
        try:
            self.loop.call_soon_threadsafe(self._notify)
        except RuntimeError:  # the loop is closed, and its readers with it
            return False
        return True

    def _notify(self) -> None:
        with self._lock:
            self._awake = False
            streams = {*self._outputs, *self._errors}
        for stream in streams:
            stream.notify()


def add_output(whole: dict[str, RequestOutput], output: RequestOutput) -> None:
    """Adds what is new of a request to what there is of it in ``whole``, by its id."""
    if output.request_id in whole:
        merge_output(whole[output.request_id], output)
    else:
        whole[output.request_id] = output


def merge_output(older: RequestOutput, newer: RequestOutput) -> None:
    """Adds a later piece of a stream to an earlier one, in place."""
    by_index = {completion.index: completion for completion in older.outputs}
    for completion in newer.outputs:
        if completion.index in by_index:
            _merge_completion(by_index[completion.index], completion)
        else:
            older.outputs.append(completion)
    older.finished = newer.finished
    older.num_cached_tokens = newer.num_cached_tokens
    if newer.prompt_logprobs is not None:
        older.prompt_logprobs = newer.prompt_logprobs
    if newer.embedding is not None:
        older.embedding = newer.embedding
    if newer.times is not None:
        older.times = newer.times


def _merge_completion(older: CompletionOutput, newer: CompletionOutput) -> None:
    older.text += newer.text
    older.token_ids.extend(newer.token_ids)
    if newer.logprobs is not None:
        older.logprobs = [*(older.logprobs or []), *newer.logprobs]
    older.finish_reason = newer.finish_reason
    older.stop_reason = newer.stop_reason
    older.error = newer.error
