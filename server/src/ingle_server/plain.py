"""Answers that are not streamed: the work stops when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse

from ingle_server.body import client_gone

T = TypeVar("T")


async def unless_client_leaves(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled when the client closes the connection first.

    ASGI servers tell streaming responses of it, plain handlers must ask. The body must have been
    read before.

    Raises:
        ApiError: 499, which nobody reads, when the client has left.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise client_gone()
    finally:
        watcher.cancel()
        worker.cancel()


def json_response(value: msgspec.Struct) -> ASGIResponse:
    """A 200 with ``value`` as its body."""
    return ASGIResponse(body=msgspec.json.encode(value), media_type="application/json")


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
