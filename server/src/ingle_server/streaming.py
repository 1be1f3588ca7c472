"""Server-sent events: frames, keep-alive comments, errors in mid-stream, the client leaving."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Send

from ingle_server.errors import ApiError, to_api_error
from ingle_server.flight import Arrival, Flight
from ingle_server.service import Service

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
ADMISSION_SECONDS = 0.1
"""How long a stream's status line waits for the engine's refusal, when no token comes sooner."""

_HEADERS = {"cache-control": "no-cache", "connection": "keep-alive", "x-accel-buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class FrameWriter(Protocol):
    """Turns pieces of output into the frames of one endpoint."""

    def opening(self) -> bytes:
        """Frames before any output."""
        ...

    def write(self, arrival: Arrival) -> bytes:
        """Frames of one arrival; none when it holds no news for the client."""
        ...

    def closing(self) -> bytes:
        """Frames after all output."""
        ...


def stream_headers() -> dict[str, str]:
    """Headers of every event stream."""
    return dict(_HEADERS)


def frame(event: Any) -> bytes:
    """One event: compact JSON on one line."""
    return b"data: %b\n\n" % _ENCODER.encode(event)


def named_frame(event: dict[str, Any]) -> bytes:
    """One event with a line that repeats its ``type``."""
    return b"event: %b\n%b" % (event["type"].encode(), frame(event))


def _failed(error: ApiError) -> bytes:
    return frame(error.body()) + DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What a stream of one door looks like around its frames.

    Attributes:
        media_type: Of the answer.
        ping: Sent after a while of silence.
        done: Sent at a good end.
        failed: What is sent instead when it goes wrong in mid-stream.
    """

    media_type: str = "text/event-stream"
    ping: bytes = PING
    done: bytes = DONE
    failed: Callable[[ApiError], bytes] = _failed


OPENAI = Wire()


class EventStream(ASGIStreamingResponse):
    """Sends a generator's frames, and closes it even when the client left during a send."""

    iterator: AsyncGenerator[bytes, None]

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Sends everything, unless the client leaves."""
        try:
            await super().send_body(send, receive)
        finally:
            with contextlib.suppress(RuntimeError):
                await self.iterator.aclose()


async def stream_response(
    service: Service, flight: Flight, writer: FrameWriter, wire: Wire = OPENAI
) -> EventStream:
    """The answer to a request with ``stream``: 200 once the engine has accepted it.

    Raises:
        Exception: What the engine refused it with.
    """
    try:
        await flight.admitted(ADMISSION_SECONDS)
    except BaseException:
        service.land(flight)
        raise
    return EventStream(
        iterator=events(service, flight, writer, wire),
        media_type=wire.media_type,
        headers=_HEADERS,
        status_code=200,
    )


async def events(
    service: Service, flight: Flight, writer: FrameWriter, wire: Wire = OPENAI
) -> AsyncGenerator[bytes]:
    """Every frame of a stream; what came while the client read goes out in one piece."""
    frames = bytearray()
    try:
        yield writer.opening()
        async for batch in flight.arrivals(service.config.sse_keep_alive):
            for arrival in batch:
                frames += writer.write(arrival)
            if frames or not batch:
                yield bytes(frames) or wire.ping
                frames.clear()
        yield writer.closing() + wire.done
    except Exception as error:  # an HTTP border: the status line is long gone
        yield bytes(frames) + wire.failed(to_api_error(error))
    finally:
        service.land(flight)
