"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle import IngleError
from ingle_server.anthropic.answer import MessageFrames, whole_message
from ingle_server.anthropic.translate import CHAT_NAMES, chat_request
from ingle_server.body import read_json
from ingle_server.chat_call import AnswerFollower, begin_chat, count_chat_tokens
from ingle_server.error_shapes import renamed
from ingle_server.errors import ApiError, bad_request, to_api_error
from ingle_server.outputs import collect
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.schemas.anthropic import MessagesRequest, TokenCount
from ingle_server.service import Service
from ingle_server.streaming import stream_response

_DECODER = msgspec.json.Decoder(MessagesRequest)


@post("/v1/messages", status_code=200)
async def create_message(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """One answer to a conversation in Anthropic's form, whole or as events."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    service.check_model(body.model)
    if body.max_tokens is None:
        raise bad_request("max_tokens is required.", "max_tokens")
    try:
        call = await begin_chat(service, chat_request(body), "msg")
    except (ApiError, IngleError) as error:
        raise renamed(to_api_error(error), CHAT_NAMES) from None
    if body.stream:
        frames = MessageFrames(call, body.model)
        return await stream_response(service, call.flight, frames, frames.wire)
    follower = AnswerFollower(call)
    try:
        work = collect(call.flight, follower.usage)
        (collected,) = await unless_client_leaves(request, work)
    finally:
        service.land(call.flight)
    pieces, end = follower.whole(collected)
    return json_response(whole_message(call, body.model, pieces, end, follower.usage.usage()))


@post("/v1/messages/count_tokens", status_code=200)
async def count_message_tokens(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[TokenCount]:
    """Tokens of a conversation in Anthropic's form."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    service.check_model(body.model)
    try:
        count = await count_chat_tokens(service, chat_request(body))
    except (ApiError, IngleError) as error:
        raise renamed(to_api_error(error), CHAT_NAMES) from None
    return Response(TokenCount(input_tokens=count))
