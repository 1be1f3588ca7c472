"""Keeps the books of a request's outputs: text so far, token counts, what ended it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, UnsetType

from ingle import CompletionOutput
from ingle.request import RequestTimes, TokenLogprob
from ingle_server.errors import generation_failed, shutting_down
from ingle_server.flight import Arrival, Flight
from ingle_server.schemas.timings import Timings
from ingle_server.schemas.usage import PromptTokensDetails, Usage

logger = logging.getLogger("ingle.server")

Finish = Literal["stop", "length"]


class UsageCounter:
    """Counts tokens as pieces arrive."""

    def __init__(self, num_prompt_tokens: int, *, timed: bool = False) -> None:
        self._timed = timed
        self._times: list[RequestTimes] = []
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached: dict[int, int] = {}

    def saw(self, arrival: Arrival) -> None:
        """Counts one arrival."""
        self._num_cached[arrival.prompt_index] = max(
            arrival.output.num_cached_tokens, self._num_cached.get(arrival.prompt_index, 0)
        )
        if arrival.output.times is not None:
            self._times.append(arrival.output.times)
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

    def timings(self) -> Timings | UnsetType:
        """The speed, when the client asked for it and a prompt's answers have all ended.

        With several prompts, times are the longest ones.
        """
        if not self._timed or not self._times:
            return UNSET
        prompt_ms = 1000 * max(times.prefill_seconds for times in self._times)
        predicted_ms = 1000 * max(times.decode_seconds for times in self._times)
        cached = sum(self._num_cached.values())
        num_prompt, num_predicted = self._num_prompt_tokens - cached, self._num_completion_tokens
        # The first token's time is the prompt's: the rate is of those after it.
        num_timed = num_predicted - 1 if num_predicted > 1 else num_predicted
        return Timings(
            cache_n=cached,
            prompt_n=num_prompt,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, num_prompt),
            prompt_per_second=_ratio(1000 * num_prompt, prompt_ms),
            predicted_n=num_predicted,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_ratio(predicted_ms, num_timed),
            predicted_per_second=_ratio(1000 * num_timed, predicted_ms),
            queue_ms=1000 * max(times.queue_seconds for times in self._times),
            draft_n=sum(times.num_draft_tokens for times in self._times),
            draft_n_accepted=sum(times.num_accepted_tokens for times in self._times),
        )


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0


@dataclass(slots=True)
class Collected:
    """One choice, complete."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: list[float] | None = None
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
            if arrival.output.embedding is not None:
                choices[first].embedding = arrival.output.embedding
            for piece in arrival.output.outputs:
                choices[first + piece.index].add(piece)
    return choices
