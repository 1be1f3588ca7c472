"""Chats: the whole answer, and the frames of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from ingle import CompletionOutput
from ingle.request import TokenLogprob
from ingle_server.flight import Arrival, Flight
from ingle_server.logprobs import TokenNamer, chat_logprobs
from ingle_server.outputs import Collected, UsageCounter, finish_of
from ingle_server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from ingle_server.schemas.usage import Usage
from ingle_server.streaming import frame


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What all parts of one answer share.

    Attributes:
        request: What the client asked.
        flight: Its generation.
        namer: Names tokens for logprobs.
        created: Unix seconds.
    """

    request: ChatCompletionRequest
    flight: Flight
    namer: TokenNamer
    created: int

    def logprobs(self, entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
        """``entries`` for the client, when it wants them."""
        if not self.request.logprobs or entries is None:
            return None
        return chat_logprobs(self.namer, entries, self.request.top_logprobs or 0)


def whole_chat(shape: ChatShape, collected: list[Collected], usage: Usage) -> ChatCompletion:
    """The answer without streaming."""
    completion = ChatCompletion(
        id=shape.flight.id,
        created=shape.created,
        model=shape.request.model,
        choices=[_choice(shape, index, each) for index, each in enumerate(collected)],
        usage=usage,
    )
    if shape.request.return_token_ids:
        completion.prompt_token_ids = shape.flight.prompts[0].token_ids
    return completion


def _choice(shape: ChatShape, index: int, collected: Collected) -> ChatChoice:
    choice = ChatChoice(
        index=index,
        message=AssistantMessage(content=collected.text),
        logprobs=shape.logprobs(collected.logprobs),
        finish_reason=collected.finish_reason,
        stop_reason=collected.stop_reason,
    )
    if shape.request.return_token_ids:
        choice.token_ids = collected.token_ids
    return choice


class ChatFrames:
    """Writes the frames of a stream: role, content pieces, one finish per choice, usage."""

    def __init__(self, shape: ChatShape, usage: UsageCounter) -> None:
        self._shape = shape
        self._usage = usage
        options = shape.request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._always_usage = bool(options and options.continuous_usage_stats)

    def opening(self) -> bytes:
        """The role, once per choice."""
        return b"".join(
            self._frame(ChatChunkChoice(index=i, delta=ChatDelta(role="assistant", content="")))
            for i in range(self._shape.flight.num_choices)
        )

    def write(self, arrival: Arrival) -> bytes:
        """One frame per piece with news, and one where a choice ends."""
        self._usage.saw(arrival)
        return b"".join(map(self._piece, arrival.output.outputs))

    def closing(self) -> bytes:
        """The usage, when it was asked for."""
        if not self._with_usage:
            return b""
        return frame(self._chunk([], self._usage.usage()))

    def _piece(self, piece: CompletionOutput) -> bytes:
        reason = finish_of(piece)
        choice = ChatChunkChoice(index=piece.index, delta=ChatDelta(content=piece.text))
        if piece.logprobs:
            choice.logprobs = self._shape.logprobs(piece.logprobs)
        if self._shape.request.return_token_ids:
            choice.token_ids = piece.token_ids
        has_news = piece.text or choice.logprobs or choice.token_ids
        frames = self._frame(choice) if has_news else b""
        if reason is not None:
            frames += self._frame(
                ChatChunkChoice(
                    index=piece.index,
                    delta=ChatDelta(),
                    finish_reason=reason,
                    stop_reason=piece.stop_reason,
                )
            )
        return frames

    def _frame(self, choice: ChatChunkChoice) -> bytes:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._always_usage:
            usage = self._usage.usage()
        return frame(self._chunk([choice], usage))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._shape.flight.id,
            created=self._shape.created,
            model=self._shape.request.model,
            choices=choices,
            usage=usage,
        )
