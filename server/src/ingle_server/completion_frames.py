"""Completions: the whole answer, and the frames of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from ingle import CompletionOutput
from ingle_server.flight import Arrival, Flight
from ingle_server.logprobs import CompletionLogprobWriter, TokenNamer, finite, prompt_logprobs
from ingle_server.outputs import Collected, UsageCounter, finish_of
from ingle_server.schemas.completion import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from ingle_server.schemas.usage import Usage
from ingle_server.streaming import frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """What all parts of one answer share.

    Attributes:
        request: What the client asked.
        flight: Its generation.
        namer: Names tokens for logprobs.
        created: Unix seconds.
        echoes: Text put before each prompt's completions.
    """

    request: CompletionRequest
    flight: Flight
    namer: TokenNamer
    created: int
    echoes: list[str]

    def completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        """One body with ``choices``."""
        return Completion(
            id=self.flight.id,
            created=self.created,
            model=self.request.model,
            choices=choices,
            usage=usage,
        )

    def logprob_writer(self, prompt_index: int) -> CompletionLogprobWriter | None:
        """Of one completion of a prompt, when the client wants logprobs."""
        if self.request.logprobs is None:
            return None
        echo = self.echoes[prompt_index]
        return CompletionLogprobWriter(self.namer, self.request.logprobs, echo)


def whole_completion(
    shape: CompletionShape, collected: list[Collected], usage: Usage
) -> Completion:
    """The answer without streaming; of more completions than asked for, the likeliest."""
    n = shape.request.n or 1
    made = shape.flight.params.n
    groups = (collected[first : first + made] for first in range(0, len(collected), made))
    best = [each for group in groups for each in _likeliest(group, n)]
    choices = [_choice(shape, index, index // n, each) for index, each in enumerate(best)]
    return shape.completion(choices, usage)


def _likeliest(group: list[Collected], n: int) -> list[Collected]:
    """The ``n`` of one prompt's completions whose tokens are likeliest on average (``best_of``)."""
    if len(group) == n:
        return group

    def mean_logprob(each: Collected) -> float:
        total = sum(finite(entry.logprob) for entry in each.logprobs)
        return total / max(len(each.logprobs), 1)

    return sorted(group, key=mean_logprob, reverse=True)[:n]


def _choice(
    shape: CompletionShape, index: int, prompt_index: int, collected: Collected
) -> CompletionChoice:
    writer = shape.logprob_writer(prompt_index)
    choice = CompletionChoice(
        index=index,
        text=shape.echoes[prompt_index] + collected.text,
        logprobs=None if writer is None else _logprobs(shape, prompt_index, writer, collected),
        finish_reason=collected.finish_reason,
        stop_reason=collected.stop_reason,
    )
    if shape.request.return_token_ids:
        choice.token_ids = collected.token_ids
        choice.prompt_token_ids = shape.flight.prompts[prompt_index].token_ids
    num_top = shape.request.prompt_logprobs
    if num_top is not None and collected.prompt_logprobs is not None:
        choice.prompt_logprobs = prompt_logprobs(shape.namer, collected.prompt_logprobs, num_top)
    return choice


def _logprobs(
    shape: CompletionShape,
    prompt_index: int,
    writer: CompletionLogprobWriter,
    collected: Collected,
) -> CompletionLogprobs:
    """Of the completion, and before it of the prompt when it is echoed."""
    own = writer.write(collected.logprobs)
    if not shape.request.echo or collected.prompt_logprobs is None:
        return own
    token_ids = shape.flight.prompts[prompt_index].token_ids
    before = writer.write_prompt(token_ids, collected.prompt_logprobs)
    return CompletionLogprobs(
        tokens=before.tokens + own.tokens,
        token_logprobs=before.token_logprobs + own.token_logprobs,
        top_logprobs=before.top_logprobs + own.top_logprobs,
        text_offset=before.text_offset + own.text_offset,
    )


class CompletionFrames:
    """Writes the frames of a stream."""

    def __init__(self, shape: CompletionShape, usage: UsageCounter) -> None:
        self._shape = shape
        self._usage = usage
        options = shape.request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._always_usage = bool(options and options.continuous_usage_stats)
        n = shape.flight.params.n
        self._begun: set[int] = set()
        self._logprobs = [shape.logprob_writer(i // n) for i in range(shape.flight.num_choices)]

    def opening(self) -> bytes:
        """The echoed prompts; with logprobs they come when those are known."""
        n = self._shape.flight.params.n
        if self._shape.request.logprobs is not None:
            return b""
        return b"".join(
            self._frame(CompletionChoice(index=i, text=self._shape.echoes[i // n]))
            for i in range(self._shape.flight.num_choices)
            if self._shape.echoes[i // n]
        )

    def write(self, arrival: Arrival) -> bytes:
        """One frame per piece with news."""
        self._usage.saw(arrival)
        first = arrival.prompt_index * self._shape.flight.params.n
        pieces = (self._piece(first + piece.index, piece) for piece in arrival.output.outputs)
        return self._echoes(arrival) + b"".join(pieces)

    def _echoes(self, arrival: Arrival) -> bytes:
        """The prompt with its logprobs, for each of its completions, when they have come."""
        entries, at = arrival.output.prompt_logprobs, arrival.prompt_index
        if entries is None or not self._shape.request.echo:
            return b""
        token_ids, n = self._shape.flight.prompts[at].token_ids, self._shape.flight.params.n
        choices = [
            CompletionChoice(
                index=index,
                text=self._shape.echoes[at],
                logprobs=writer.write_prompt(token_ids, entries),
            )
            for index, writer in enumerate(self._logprobs)
            if index // n == at and writer is not None
        ]
        return b"".join(map(self._frame, choices))

    def closing(self) -> bytes:
        """The usage, when it was asked for."""
        if not self._with_usage:
            return b""
        end = self._shape.completion([], self._usage.usage())
        end.timings = self._usage.timings()
        return frame(end)

    def _piece(self, index: int, piece: CompletionOutput) -> bytes:
        reason = finish_of(piece)
        writer = self._logprobs[index]
        choice = CompletionChoice(index=index, text=piece.text, finish_reason=reason)
        if writer is not None and piece.logprobs:
            choice.logprobs = writer.write(piece.logprobs)
        if self._shape.request.return_token_ids:
            choice.token_ids = piece.token_ids
            if index not in self._begun:
                prompt = self._shape.flight.prompts[index // self._shape.flight.params.n]
                choice.prompt_token_ids = prompt.token_ids
                self._begun.add(index)
        if reason is not None:
            choice.stop_reason = piece.stop_reason
        has_news = piece.text or reason or choice.logprobs or choice.token_ids
        return self._frame(choice) if has_news else b""

    def _frame(self, choice: CompletionChoice) -> bytes:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._always_usage:
            usage = self._usage.usage()
        chunk = self._shape.completion([choice], usage)
        if choice.finish_reason is not None:
            chunk.timings = self._usage.timings()
        return frame(chunk)
