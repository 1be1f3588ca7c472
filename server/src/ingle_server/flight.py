"""One HTTP request's generation: several prompts merged into one sequence of pieces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from ingle import CompletionOutput, RequestOutput, SamplingParams
from ingle_server.bell import Bell
from ingle_server.engine_client import EngineClient

MAX_PIECES = 256
"""Pieces of output that wait for a reader; a reader that keeps up never sees more than a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt ready for the engine; ``text`` as given, None when it came as tokens."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What the engine said about one prompt: prompt ``prompt_index``'s next pieces."""

    prompt_index: int
    output: RequestOutput


class Flight:
    """Runs the prompts through the engine, each pumped by its own task into one inbox.

    A reader that is slow, or asleep, holds up neither the engine nor anybody else: once the inbox
    holds ``MAX_PIECES``, the pumps stop fetching, and the engine's side merges what is new into one
    piece per prompt.

    ``close`` must be called however the request ends; until then blocks of the cache are held.
    """

    def __init__(self, flight_id: str, prompts: list[Prompt], params: SamplingParams) -> None:
        self.id = flight_id
        self.prompts = prompts
        self.params = params
        self._inbox: deque[Arrival] = deque()
        self._news = Bell()
        self._room = asyncio.Event()
        self._room.set()
        self._error: Exception | None = None
        self._num_left = len(prompts)
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def num_pieces(self) -> int:
        """Pieces that wait for the reader."""
        return len(self._inbox)

    @property
    def num_choices(self) -> int:
        """Completions in all."""
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def start(self, engine: EngineClient) -> None:
        """Hands the prompts to the engine."""
        self._pumps = [
            asyncio.create_task(self._pump(engine, index)) for index in range(len(self.prompts))
        ]

    async def admitted(self, seconds: float) -> None:
        """Waits for the first sign of life, ``seconds`` at most.

        The engine refuses a request at its first step; waiting for it turns the refusal into a
        status code instead of an event in a stream that began with 200.

        Raises:
            Exception: What the engine refused it with.
        """
        await self._news.wait(seconds)
        if self._error is not None and not self._inbox:
            raise self._error

    async def arrivals(self, ping_seconds: float) -> AsyncGenerator[list[Arrival]]:
        """Everything that has come since the last look; an empty list after ``ping_seconds``.

        Raises:
            Exception: The first failure, of whichever prompt, ends them all.
        """
        while self._num_left or self._inbox or self._error:
            silent = not await self._news.wait(ping_seconds)
            self._news.silence()
            batch = list(self._inbox)
            self._inbox.clear()
            self._room.set()
            if not batch and self._error is not None:
                raise self._error
            if batch or silent:
                yield batch
            if self._error is not None:
                self._news.ring()

    def fail(self, error: Exception) -> None:
        """Ends the request with ``error``, after what has come already."""
        self._error = self._error or error
        self._news.ring()

    def close(self) -> None:
        """Aborts whatever is still running. Safe to call twice."""
        for pump in self._pumps:
            pump.cancel()
        self._news.close()

    async def _pump(self, engine: EngineClient, index: int) -> None:
        try:
            async with aclosing(self._outputs(engine, index)) as outputs:
                async for output in outputs:
                    self._inbox.append(Arrival(prompt_index=index, output=output))
                    self._news.ring()
                    if len(self._inbox) >= MAX_PIECES:
                        self._room.clear()
                        await self._room.wait()
        except Exception as error:  # an HTTP border: the reader turns it into an answer
            self.fail(error)
        finally:
            self._num_left -= 1
            self._news.ring()

    def _outputs(self, engine: EngineClient, index: int) -> AsyncGenerator[RequestOutput]:
        prompt = self.prompts[index]
        wants = (self.params.prompt_logprobs, self.params.pooling)
        if self.params.max_tokens == 0 and wants == (None, None):
            return _nothing(self.id, self.params.n)
        # The engine's iterators are generators: closing them early is what aborts a request.
        return cast(
            "AsyncGenerator[RequestOutput]",
            engine.generate(f"{self.id}-{index}", prompt.token_ids, self.params, prompt.text),
        )


async def _nothing(flight_id: str, n: int) -> AsyncGenerator[RequestOutput]:
    """What generating no tokens gives (``echo`` with ``max_tokens`` 0)."""
    outputs = [CompletionOutput(index=index, finish_reason="length") for index in range(n)]
    yield RequestOutput(request_id=flight_id, outputs=outputs, finished=True)
