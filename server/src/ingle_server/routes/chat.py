"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle_server.body import read_json
from ingle_server.chat_call import begin_chat
from ingle_server.chat_frames import ChatFrames, ChatShape, whole_chat
from ingle_server.logprobs import TokenNamer
from ingle_server.outputs import UsageCounter, collect
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.schemas.chat import ChatCompletionRequest
from ingle_server.service import Service
from ingle_server.streaming import stream_response

_DECODER = msgspec.json.Decoder(ChatCompletionRequest)


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """One answer of the model to a conversation, whole or as server-sent events."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    call = await begin_chat(service, body, "chatcmpl")
    flight = call.flight
    shape = ChatShape(
        request=body,
        flight=flight,
        namer=TokenNamer(service.engine, as_ids=bool(body.return_tokens_as_token_ids)),
        created=int(time.time()),
        new_reader=call.new_reader,
    )
    timed = bool(body.timings or body.timings_per_token)
    usage = UsageCounter(flight.num_prompt_tokens, timed=timed)
    if body.stream:
        return await stream_response(service, flight, ChatFrames(shape, usage))
    try:
        collected = await unless_client_leaves(request, collect(flight, usage))
    finally:
        service.land(flight)
    answer = whole_chat(shape, collected, usage.usage())
    answer.timings = usage.timings()
    return json_response(answer)
