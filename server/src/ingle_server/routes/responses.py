"""``/v1/responses``: ask, look up, list what it answered, cancel, delete."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from ingle import IngleError
from ingle_server.body import read_json
from ingle_server.chat_call import begin_chat
from ingle_server.error_shapes import renamed
from ingle_server.errors import (
    ApiError,
    bad_request,
    generation_failed,
    shown,
    to_api_error,
)
from ingle_server.logprobs import TokenNamer
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.responses.conversation import input_items
from ingle_server.responses.run import ResponseFrames, ResponseRun, new_response
from ingle_server.responses.translate import CHAT_NAMES, chat_request, check_request
from ingle_server.schemas.responses import (
    DeletedResponse,
    Item,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from ingle_server.service import Service
from ingle_server.streaming import stream_response

_DECODER = msgspec.json.Decoder(ResponsesRequest)
DEFAULT_PAGE = 20
MAX_PAGE = 100


@post("/v1/responses", status_code=200)
async def create_response(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """One answer to a conversation of items, whole, as events, or in the background."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    run = await _begin(service, body)
    flight = run.call.flight
    if body.stream:
        frames = ResponseFrames(run)
        return await stream_response(service, flight, frames, frames.wire)
    if body.background:
        run.keep()
        service.responses.get(run.response.id).task = asyncio.create_task(_finish(service, run))
        return json_response(run.response)
    try:
        return json_response(await unless_client_leaves(request, run.whole()))
    finally:
        service.land(flight)


@get("/v1/responses/{response_id:str}")
async def retrieve_response(
    response_id: FromPath[str], request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[ResponseObject]:
    """A response that is kept."""
    if request.query_params.get("stream") in ("true", "1"):
        raise bad_request("A response that is kept cannot be streamed again.", "stream")
    return Response(service.responses.get(response_id).response)


@delete("/v1/responses/{response_id:str}", status_code=200)
async def delete_response(
    response_id: FromPath[str], service: NamedDependency[Service]
) -> Response[DeletedResponse]:
    """Forgets a response; one that is being computed in the background is given up."""
    stored = service.responses.pop(response_id)
    if stored.task is not None:
        stored.task.cancel()
    return Response(DeletedResponse(id=response_id))


@post("/v1/responses/{response_id:str}/cancel", status_code=200)
async def cancel_response(
    response_id: FromPath[str], service: NamedDependency[Service]
) -> Response[ResponseObject]:
    """Gives up a response that is being computed in the background."""
    stored = service.responses.get(response_id)
    response = stored.response
    if response.status == "cancelled":
        return Response(response)
    if not response.background:
        raise bad_request("Only a response with background true can be cancelled.", "response_id")
    if stored.task is not None and not stored.task.done():
        response.status = "cancelled"
        stored.task.cancel()
    return Response(response)


@get("/v1/responses/{response_id:str}/input_items")
async def list_input_items(
    response_id: FromPath[str], request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[ItemList]:
    """The items that a response answered, the newest first unless ``order`` is ``asc``."""
    query = request.query_params
    items = list(service.responses.get(response_id).items)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {shown(order)}.", "order")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        items = items[_place(items, after) + 1 :]
    limit = _limit(query.get("limit", str(DEFAULT_PAGE)))
    page = items[:limit]
    return Response(
        ItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(items) > limit,
        )
    )


def _place(items: list[Item], after: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == after:
            return place
    raise bad_request(f"after names no item of this response: {shown(after)}.", "after")


def _limit(value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= MAX_PAGE):
        raise bad_request(f"limit must be from 1 to {MAX_PAGE}, got {shown(value)}.", "limit")
    return int(value)


async def _begin(service: Service, body: ResponsesRequest) -> ResponseRun:
    service.check_model(body.model)
    check_request(body)
    items = [*_earlier(service, body.previous_response_id), *input_items(body.input)]
    try:
        call = await begin_chat(service, chat_request(body, items), "resp")
    except (ApiError, IngleError) as error:
        raise renamed(to_api_error(error), CHAT_NAMES) from None
    return ResponseRun(
        body=body,
        call=call,
        response=new_response(body, call),
        items=items,
        namer=TokenNamer(service.engine, as_ids=bool(body.return_tokens_as_token_ids)),
        store=service.responses,
    )


def _earlier(service: Service, response_id: str | None) -> list[Item]:
    if response_id is None:
        return []
    if not service.responses.has(response_id):
        raise bad_request(
            f"Previous response with id {shown(response_id)} not found.",
            "previous_response_id",
            "previous_response_not_found",
        )
    stored = service.responses.get(response_id)
    if stored.response.status in ("queued", "in_progress"):
        raise bad_request(
            f"The response {shown(response_id)} is not finished yet.", "previous_response_id"
        )
    return stored.conversation


async def _finish(service: Service, run: ResponseRun) -> None:
    """A response in the background, to its end."""
    try:
        await run.whole()
    except (ApiError, IngleError) as error:
        run.fail(to_api_error(error))
    finally:
        service.land(run.call.flight)
        if run.response.status == "in_progress":
            run.fail(generation_failed())
