"""Server-sent events: frames, keep-alive comments, errors in mid-stream, the client leaving."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Send

from ingle_server.errors import to_api_error
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


async def stream_response(service: Service, flight: Flight, writer: FrameWriter) -> EventStream:
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
        iterator=events(service, flight, writer),
        media_type="text/event-stream",
        headers=_HEADERS,
        status_code=200,
    )


async def events(service: Service, flight: Flight, writer: FrameWriter) -> AsyncGenerator[bytes]:
    """Every frame of a stream; what came while the client read goes out in one piece."""
    frames = bytearray()
    try:
        yield writer.opening()
        async for batch in flight.arrivals(service.config.sse_keep_alive):
            for arrival in batch:
                frames += writer.write(arrival)
            if frames or not batch:
                yield bytes(frames) or PING
                frames.clear()
        yield writer.closing() + DONE
    except Exception as error:  # an HTTP border: the status line is long gone
        yield bytes(frames) + frame(to_api_error(error).body()) + DONE
    finally:
        service.land(flight)
