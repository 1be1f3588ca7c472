"""Keeps the books of a request's outputs: text so far, token counts, what ended it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from ingle import CompletionOutput
from ingle.request import TokenLogprob
from ingle_server.errors import generation_failed, shutting_down
from ingle_server.flight import Arrival, Flight
from ingle_server.schemas.usage import PromptTokensDetails, Usage

logger = logging.getLogger("ingle.server")

Finish = Literal["stop", "length"]


class UsageCounter:
    """Counts tokens as pieces arrive."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached: dict[int, int] = {}

    def saw(self, arrival: Arrival) -> None:
        """Counts one arrival."""
        self._num_cached[arrival.prompt_index] = max(
            arrival.output.num_cached_tokens, self._num_cached.get(arrival.prompt_index, 0)
        )
        for piece in arrival.output.outputs:
            self._num_completion_tokens += len(piece.token_ids)

    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached.values())),
        )


@dataclass(slots=True)
class Collected:
    """One choice, complete."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: Finish = "stop"
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    def add(self, piece: CompletionOutput) -> None:
        """Adds what is new."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        reason = finish_of(piece)
        if reason is not None:
            self.finish_reason = reason
            self.stop_reason = piece.stop_reason


def finish_of(piece: CompletionOutput) -> Finish | None:
    """Why the choice ended, or None while it goes on.

    Raises:
        ApiError: When it ended badly.
    """
    if piece.finish_reason == "error":
        logger.error("Generation failed: %s", piece.error)
        raise generation_failed()
    if piece.finish_reason == "abort":
        raise shutting_down()
    return piece.finish_reason


async def collect(flight: Flight, usage: UsageCounter) -> list[Collected]:
    """Every choice, prompt-major, once all have ended."""
    choices = [Collected() for _ in range(flight.num_choices)]
    async for batch in flight.arrivals(ping_seconds=3600.0):
        for arrival in batch:
            usage.saw(arrival)
            first = arrival.prompt_index * flight.params.n
            if arrival.output.prompt_logprobs is not None:
                for choice in choices[first : first + flight.params.n]:
                    choice.prompt_logprobs = arrival.output.prompt_logprobs
            for piece in arrival.output.outputs:
                choices[first + piece.index].add(piece)
    return choices
