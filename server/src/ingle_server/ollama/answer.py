"""Ollama's answers: lines of JSON, the last one with counts and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ingle_server.chat_call import AnswerEnd, AnswerFollower, ChatCall
from ingle_server.error_shapes import ollama_error
from ingle_server.errors import ApiError
from ingle_server.flight import Arrival
from ingle_server.outputs import Collected
from ingle_server.schemas.ollama import Frame
from ingle_server.streaming import Wire
from ingle_server.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning

_ENCODER = msgspec.json.Encoder()


def line(frame: Frame) -> bytes:
    """One line."""
    return _ENCODER.encode(frame) + b"\n"


def failed(error: ApiError) -> bytes:
    """The last line of a stream that went wrong."""
    return line(ollama_error(error))


WIRE = Wire(media_type="application/x-ndjson", ping=b"", done=b"", failed=failed)


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class CallGatherer:
    """Gathers calls until they are whole: Ollama's clients get no halves."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments: list[str] = []

    def push(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Calls that have become whole."""
        calls = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls += self.finish()
                self._name = piece.name
            elif isinstance(piece, CallArguments):
                self._arguments.append(piece.text)
        return calls

    def finish(self) -> list[dict[str, Any]]:
        """The last call."""
        if self._name is None:
            return []
        try:
            arguments = msgspec.json.decode("".join(self._arguments))
        except msgspec.DecodeError:  # cut by num_predict
            arguments = {}
        call = {"function": {"name": self._name, "arguments": arguments}}
        self._name, self._arguments = None, []
        return [call]


def message_body(text: str, thinking: str, calls: list[dict[str, Any]]) -> Frame:
    """A chat's share of a line."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def response_body(text: str, thinking: str, _calls: list[dict[str, Any]]) -> Frame:
    """A continuation's share of a line."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class OllamaAnswer:
    """One answer, as lines or as one object.

    Args:
        call: Its generation.
        model: As the client named it.
        body: Makes the share of a line that differs between chats and continuations.
    """

    def __init__(
        self,
        call: ChatCall,
        model: str,
        body: Callable[[str, str, list[dict[str, Any]]], Frame],
    ) -> None:
        self.follower = AnswerFollower(call)
        self._model = model
        self._body = body
        self._calls = CallGatherer()
        self._started = time.monotonic()
        self._first: float | None = None

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def write(self, arrival: Arrival) -> bytes:
        """A line with what is new, and the last line."""
        self._first = self._first or time.monotonic()
        pieces, end = self.follower.follow(arrival)
        text, thinking = _texts(pieces)
        calls = self._calls.push(pieces) + (self._calls.finish() if end else [])
        lines = b""
        if text or thinking or calls:
            lines += line(self._frame(text, thinking, calls) | {"done": False})
        if end is not None:
            lines += line(self._frame("", "", []) | self._end(end))
        return lines

    def closing(self) -> bytes:
        """Nothing: the last line has been sent."""
        return b""

    def whole(self, collected: Collected) -> Frame:
        """The answer without streaming."""
        pieces, end = self.follower.whole(collected)
        text, thinking = _texts(pieces)
        calls = self._calls.push(pieces) + self._calls.finish()
        return self._frame(text, thinking, calls) | self._end(end)

    def _frame(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> Frame:
        body = self._body(text, thinking, calls)
        return {"model": self._model, "created_at": now(), **body}

    def _end(self, end: AnswerEnd) -> Frame:
        usage, ended = self.follower.usage.usage(), time.monotonic()
        first = self._first or ended
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": _nanoseconds(ended - self._started),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self._started),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(ended - first) or 1,
        }


def _texts(pieces: Sequence[Piece]) -> tuple[str, str]:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return text, "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
