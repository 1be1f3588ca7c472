"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle_server.body import read_json
from ingle_server.completion_call import begin_completion
from ingle_server.completion_frames import CompletionFrames, CompletionShape, whole_completion
from ingle_server.flight import Prompt
from ingle_server.logprobs import TokenNamer
from ingle_server.outputs import UsageCounter, collect
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.schemas.completion import CompletionRequest
from ingle_server.service import Service
from ingle_server.streaming import stream_response

_DECODER = msgspec.json.Decoder(CompletionRequest)


@post("/v1/completions", status_code=200)
async def create_completion(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """Continuations of one or several prompts, whole or as server-sent events."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    flight = await begin_completion(service, body, "cmpl")
    shape = CompletionShape(
        request=body,
        flight=flight,
        namer=TokenNamer(service.engine, as_ids=bool(body.return_tokens_as_token_ids)),
        created=int(time.time()),
        echoes=[_echo(service, body, prompt) for prompt in flight.prompts],
    )
    timed = bool(body.timings or body.timings_per_token)
    usage = UsageCounter(flight.num_prompt_tokens, timed=timed)
    if body.stream:
        return await stream_response(service, flight, CompletionFrames(shape, usage))
    try:
        collected = await unless_client_leaves(request, collect(flight, usage))
    finally:
        service.land(flight)
    answer = whole_completion(shape, collected, usage.usage())
    answer.timings = usage.timings()
    return json_response(answer)


def _echo(service: Service, body: CompletionRequest, prompt: Prompt) -> str:
    if not body.echo:
        return ""
    return service.engine.decode(prompt.token_ids) if prompt.text is None else prompt.text
