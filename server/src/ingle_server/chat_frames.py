"""Chats: the whole answer, and the frames of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET, UnsetType

from ingle import CompletionOutput
from ingle.request import TokenLogprob
from ingle_server.flight import Arrival, Flight
from ingle_server.logprobs import TokenNamer, chat_logprobs, prompt_logprobs
from ingle_server.outputs import Collected, UsageCounter, finish_of
from ingle_server.schemas.chat import (
    AssistantMessage,
    AssistantToolCall,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    FunctionDelta,
    ToolCallDelta,
)
from ingle_server.schemas.timings import Timings
from ingle_server.schemas.usage import Usage
from ingle_server.streaming import frame
from ingle_server.tools.answer import AnswerReader
from ingle_server.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What all parts of one answer share.

    Attributes:
        request: What the client asked.
        flight: Its generation.
        namer: Names tokens for logprobs.
        created: Unix seconds.
        new_reader: Makes the reader of one choice's text.
    """

    request: ChatCompletionRequest
    flight: Flight
    namer: TokenNamer
    created: int
    new_reader: Callable[[], AnswerReader]

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
    num_top, known = shape.request.prompt_logprobs, collected[0].prompt_logprobs
    if num_top is not None and known is not None:
        completion.prompt_logprobs = prompt_logprobs(shape.namer, known, num_top)
    return completion


def _choice(shape: ChatShape, index: int, collected: Collected) -> ChatChoice:
    reader = shape.new_reader()
    pieces = reader.push(collected.text) + reader.finish()
    choice = ChatChoice(
        index=index,
        message=_message(pieces),
        logprobs=shape.logprobs(collected.logprobs),
        finish_reason=_reason(collected.finish_reason, reader),
        stop_reason=collected.stop_reason,
    )
    if shape.request.return_token_ids:
        choice.token_ids = collected.token_ids
        choice.prompt_token_ids = shape.flight.prompts[0].token_ids
    return choice


def _message(pieces: Sequence[Piece]) -> AssistantMessage:
    """The pieces of an answer as one message."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [
        AssistantToolCall(
            id=start.id,
            function=CalledFunction(name=start.name, arguments=_arguments(pieces, start.index)),
        )
        for start in pieces
        if isinstance(start, CallStart)
    ]
    message = AssistantMessage(content=content)
    if calls:
        message.tool_calls = calls
        message.content = content if content.strip() else None
    if thoughts:
        message.reasoning_content = thoughts
    return message


def _arguments(pieces: Sequence[Piece], index: int) -> str:
    parts = (p.text for p in pieces if isinstance(p, CallArguments) and p.index == index)
    return "".join(parts)


def _reason(
    reason: Literal["stop", "length"], reader: AnswerReader
) -> Literal["stop", "length", "tool_calls"]:
    return "tool_calls" if reason == "stop" and reader.ends_with_calls else reason


def _delta(piece: Piece) -> ChatDelta:
    match piece:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallStart(index, call_id, name):
            function = FunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=call_id, type="function", function=function)
            return ChatDelta(tool_calls=[call])
        case CallArguments(index, text):
            call = ToolCallDelta(index=index, function=FunctionDelta(arguments=text))
            return ChatDelta(tool_calls=[call])


class ChatFrames:
    """Writes the frames of a stream: role, content pieces, one finish per choice, usage."""

    def __init__(self, shape: ChatShape, usage: UsageCounter) -> None:
        self._shape = shape
        self._usage = usage
        self._readers = [shape.new_reader() for _ in range(shape.flight.num_choices)]
        options = shape.request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._always_usage = bool(options and options.continuous_usage_stats)

    def opening(self) -> bytes:
        """The role, once per choice, and the prompt's tokens for who wants them."""
        shape = self._shape
        prompt = shape.flight.prompts[0].token_ids if shape.request.return_token_ids else UNSET
        return b"".join(
            self._frame(
                ChatChunkChoice(
                    index=i,
                    delta=ChatDelta(role="assistant", content=""),
                    prompt_token_ids=prompt,
                )
            )
            for i in range(shape.flight.num_choices)
        )

    def write(self, arrival: Arrival) -> bytes:
        """One frame per piece with news, and one where a choice ends."""
        self._usage.saw(arrival)
        return b"".join(map(self._piece, arrival.output.outputs))

    def closing(self) -> bytes:
        """The usage, when it was asked for."""
        if not self._with_usage:
            return b""
        return frame(self._chunk([], self._usage.usage(), self._usage.timings()))

    def _piece(self, piece: CompletionOutput) -> bytes:
        reason = finish_of(piece)
        reader = self._readers[piece.index]
        pieces = reader.push(piece.text) + (reader.finish() if reason is not None else [])
        frames = self._news(piece, [_delta(each) for each in pieces])
        if reason is not None:
            frames += self._frame(
                ChatChunkChoice(
                    index=piece.index,
                    delta=ChatDelta(),
                    finish_reason=_reason(reason, reader),
                    stop_reason=piece.stop_reason,
                ),
                self._usage.timings(),
            )
        return frames

    def _news(self, piece: CompletionOutput, deltas: list[ChatDelta]) -> bytes:
        """One frame per delta; the first one carries what is known of the tokens."""
        choices = [ChatChunkChoice(index=piece.index, delta=delta) for delta in deltas]
        first = choices[0] if choices else ChatChunkChoice(index=piece.index, delta=ChatDelta())
        if piece.logprobs:
            first.logprobs = self._shape.logprobs(piece.logprobs)
        if self._shape.request.return_token_ids:
            first.token_ids = piece.token_ids
        if not choices and (first.logprobs or first.token_ids):
            choices.append(first)
        return b"".join(map(self._frame, choices))

    def _frame(self, choice: ChatChunkChoice, timings: Timings | UnsetType = UNSET) -> bytes:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._always_usage:
            usage = self._usage.usage()
        return frame(self._chunk([choice], usage, timings))

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        timings: Timings | UnsetType,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._shape.flight.id,
            created=self._shape.created,
            model=self._shape.request.model,
            choices=choices,
            usage=usage,
            timings=timings,
        )
