"""Builds Anthropic's message from an answer's pieces, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ingle_server.chat_call import AnswerEnd, AnswerFollower, ChatCall
from ingle_server.error_shapes import anthropic_error
from ingle_server.errors import ApiError
from ingle_server.flight import Arrival
from ingle_server.schemas.anthropic import Block, MessageObject, MessageUsage
from ingle_server.schemas.usage import Usage
from ingle_server.streaming import Wire, named_frame
from ingle_server.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = named_frame({"type": "ping"})


class BlockBuilder:
    """One block is open at a time. Blank text is held back until it is clear that text follows."""

    def __init__(self) -> None:
        self.content: list[Block] = []
        self._is_open = False
        self._blank = ""
        self._arguments = ""

    def push(self, pieces: Sequence[Piece]) -> list[Event]:
        """Events of what is new."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._text(self._blank + text)
                case Reasoning(text):
                    events += self._opened({"type": "thinking", "thinking": "", "signature": ""})
                    self.content[-1]["thinking"] += text
                    events.append(self._delta("thinking_delta", thinking=text))
                case CallStart(_, call_id, name):
                    self._blank = ""
                    events += self.close()
                    block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    events += self._opened(block)
                case CallArguments(_, text):
                    self._arguments += text
                    events.append(self._delta("input_json_delta", partial_json=text))
        return events

    def finish(self) -> list[Event]:
        """Events of the end."""
        held, self._blank = self._blank, ""
        if held and not any(block["type"] == "tool_use" for block in self.content):
            return self._say(held) + self.close()
        return self.close()

    def close(self) -> list[Event]:
        """Ends the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        if self._arguments:
            self.content[-1]["input"] = _object(self._arguments)
            self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _text(self, text: str) -> list[Event]:
        self._blank = "" if text.strip() else text
        return self._say(text) if text.strip() else []

    def _say(self, text: str) -> list[Event]:
        events = self._opened({"type": "text", "text": ""})
        self.content[-1]["text"] += text
        return [*events, self._delta("text_delta", text=text)]

    def _opened(self, block: Block) -> list[Event]:
        kind = block["type"]
        if self._is_open and kind != "tool_use" and self.content[-1]["type"] == kind:
            return []
        events = self.close()
        self.content.append(block)
        self._is_open = True
        start = {"type": "content_block_start", "index": len(self.content) - 1}
        return [*events, {**start, "content_block": dict(block)}]

    def _delta(self, kind: str, **fields: str) -> Event:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def whole_message(
    call: ChatCall, model: str, pieces: Sequence[Piece], end: AnswerEnd, usage: Usage
) -> MessageObject:
    """The answer without streaming."""
    builder = BlockBuilder()
    builder.push(pieces)
    builder.finish()
    return MessageObject(
        id=message_id(call),
        model=model,
        content=builder.content,
        stop_reason=_stop_reason(end, builder.content),
        stop_sequence=_stop_sequence(end),
        usage=_usage(usage),
    )


class MessageFrames:
    """Writes the events of a stream."""

    def __init__(self, call: ChatCall, model: str) -> None:
        self._call = call
        self._model = model
        self._follower = AnswerFollower(call)
        self._builder = BlockBuilder()

    @property
    def wire(self) -> Wire:
        """There is no ``[DONE]``; pings and failures are events."""
        return Wire(done=b"", ping=PING, failed=_failed)

    def opening(self) -> bytes:
        """The message without content."""
        usage = _usage(self._follower.usage.usage())
        message = MessageObject(
            id=message_id(self._call), model=self._model, content=[], usage=usage
        )
        start = {"type": "message_start", "message": msgspec.to_builtins(message)}
        return named_frame(start) + PING

    def write(self, arrival: Arrival) -> bytes:
        """What is new, and the end."""
        pieces, end = self._follower.follow(arrival)
        events = self._builder.push(pieces)
        if end is not None:
            usage = msgspec.to_builtins(_usage(self._follower.usage.usage()))
            events += self._builder.finish()
            reason = _stop_reason(end, self._builder.content)
            delta = {"stop_reason": reason, "stop_sequence": _stop_sequence(end)}
            events.append({"type": "message_delta", "delta": delta, "usage": usage})
            events.append({"type": "message_stop"})
        return b"".join(map(named_frame, events))

    def closing(self) -> bytes:
        """Nothing: the last event has been sent."""
        return b""


def message_id(call: ChatCall) -> str:
    """The message's id."""
    return call.flight.id.replace("msg-", "msg_", 1)


def _failed(error: ApiError) -> bytes:
    return named_frame(anthropic_error(error))


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )


def _stop_reason(end: AnswerEnd, content: Sequence[Block]) -> str:
    """A named tool ends an OpenAI answer with ``stop``; Anthropic's clients look for the block."""
    if end.reason == "stop" and isinstance(end.stop_reason, str):
        return "stop_sequence"
    calls = any(block["type"] == "tool_use" for block in content)
    return "tool_use" if calls and end.reason != "length" else _REASONS[end.reason]


def _stop_sequence(end: AnswerEnd) -> str | None:
    return end.stop_reason if isinstance(end.stop_reason, str) else None


def _object(text: str) -> Any:
    """The arguments of a call; those that ``max_tokens`` cut short are no JSON yet."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
