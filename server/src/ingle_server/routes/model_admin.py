"""``POST /v1/model/load`` and ``POST`` or ``DELETE /v1/model/unload``, for holders of an admin key.

A name is looked up among the models of the command line: a key, never a path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Request, Response, post, route
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle_server.auth import KeyRing, admin_authorization
from ingle_server.body import read_json
from ingle_server.errors import ApiError, bad_request, shorten, to_api_error
from ingle_server.model_entry import ModelEntry
from ingle_server.plain import json_response
from ingle_server.schemas.model_admin import ModelLoadProgress, ModelLoadRequest, ModelState
from ingle_server.service import Service
from ingle_server.streaming import DONE, PING, EventStream, frame, stream_headers

_DECODER = msgspec.json.Decoder(ModelLoadRequest)
_Request = Request[Any, Any, State]


@post("/v1/model/load", status_code=200)
async def load_model(request: _Request, server: NamedDependency[Service]) -> ASGIResponse:
    """Loads a model in place of the one in memory, once the requests before it are answered.

    The progress comes as server-sent events, unless ``stream`` is false.
    """
    check_admin(request, server)
    config = server.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    entry = _asked(server, body)
    if body.stream is False:
        await server.models.load(entry)
        return json_response(_finished(entry))
    return EventStream(
        iterator=_progress(server, entry),
        media_type="text/event-stream",
        headers=stream_headers(),
        status_code=200,
    )


@route("/v1/model/unload", http_method=["POST", "DELETE"], status_code=200)
async def unload_model(request: _Request, server: NamedDependency[Service]) -> Response[ModelState]:
    """Gives the model's memory back, once the requests before it are answered."""
    check_admin(request, server)
    loaded = server.models.current
    name = None if loaded is None else loaded.entry.name
    del loaded  # or this very frame would hold what it wants gone
    await server.models.unload()
    return Response(ModelState(model=name))


def check_admin(request: _Request, server: Service) -> None:
    """Lets holders of an admin key pass.

    Raises:
        ApiError: 403 when the server has no admin key, 401 when the client's is missing or wrong.
    """
    keys = server.config.admin_key
    if not keys:
        raise ApiError(
            403,
            "Loading and unloading models is closed: the server was started without --admin-key.",
            code="admin_key_required",
        )
    KeyRing(keys).check(admin_authorization(dict(request.scope["headers"])))


def _asked(server: Service, body: ModelLoadRequest) -> ModelEntry:
    name = body.model or body.name or body.model_name
    if not name:
        raise bad_request("model is required: the name of one of /v1/models.", "model")
    entry = server.models.find(name)
    if entry is None:
        raise ApiError(
            404,
            f"The model `{shorten(name)}` does not exist; GET /v1/models lists those that do.",
            param="model",
            code="model_not_found",
        )
    return entry


async def _progress(server: Service, entry: ModelEntry) -> AsyncGenerator[bytes]:
    """Every percent once, then the end."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[ModelLoadProgress | None] = asyncio.Queue()

    def report(done: int, total: int) -> None:  # in the loading thread
        loop.call_soon_threadsafe(news.put_nowait, _step(entry, done, total))

    loading = asyncio.create_task(server.models.load(entry, report))
    loading.add_done_callback(lambda _task: news.put_nowait(None))
    percent = -1
    try:
        while (step := await _next(news, server.config.sse_keep_alive)) is not None:
            if isinstance(step, bytes):
                yield step
            elif step.module > percent:
                percent = step.module
                yield frame(step)
        await loading
        yield frame(_finished(entry)) + DONE
    except Exception as error:  # an HTTP border: the status line is long gone
        yield frame(to_api_error(error).body()) + DONE
    finally:
        # A reader that left does not stop the load: others may wait for it by now.
        with contextlib.suppress(asyncio.InvalidStateError):
            loading.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _next(
    news: asyncio.Queue[ModelLoadProgress | None], seconds: float
) -> ModelLoadProgress | bytes | None:
    try:
        async with asyncio.timeout(seconds):
            return await news.get()
    except TimeoutError:
        return PING


def _step(entry: ModelEntry, done: int, total: int) -> ModelLoadProgress:
    percent = min(99, 100 * done // total) if total else 0
    return ModelLoadProgress(
        model=entry.name,
        status="processing",
        bytes_read=done,
        bytes_total=total,
        module=percent,
    )


def _finished(entry: ModelEntry) -> ModelLoadProgress:
    return ModelLoadProgress(model=entry.name, status="finished", module=100)
