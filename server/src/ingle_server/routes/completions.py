"""``POST /v1/completions``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle_server.body import read_json
from ingle_server.completion_frames import CompletionFrames, CompletionShape, whole_completion
from ingle_server.errors import bad_request, not_supported
from ingle_server.flight import Flight, Prompt
from ingle_server.logprobs import TokenNamer
from ingle_server.outputs import UsageCounter, collect
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.prompts import RawPrompt, encode_prompts, split_prompts
from ingle_server.schemas.completion import CompletionRequest
from ingle_server.service import Service
from ingle_server.streaming import stream_response
from ingle_server.structured import Wanted, check_grammar, wanted_output
from ingle_server.translate import (
    DEFAULT_COMPLETION_TOKENS,
    check_count,
    check_fields,
    check_logprobs,
    check_max_tokens,
    sampling_params,
    token_budget,
)
from ingle_server.words import words_of

MAX_BEST_OF = 20

_DECODER = msgspec.json.Decoder(CompletionRequest)


@post("/v1/completions", status_code=200)
async def create_completion(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """Continuations of one or several prompts, whole or as server-sent events."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    raw = _check(service, body)
    wanted = wanted_output(body)
    await check_grammar(service.engine, wanted)
    prompts = await encode_prompts(service, body, raw)
    flight = _take_off(service, body, prompts, wanted)
    shape = CompletionShape(
        request=body,
        flight=flight,
        namer=TokenNamer(service.engine, as_ids=bool(body.return_tokens_as_token_ids)),
        created=int(time.time()),
        echoes=[_echo(service, body, prompt) for prompt in prompts],
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


def _check(service: Service, body: CompletionRequest) -> list[RawPrompt]:
    """Checks every field, and gives the prompts to tokenise.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    service.check_model(body.model)
    service.check_alive()
    check_max_tokens("max_tokens", body.max_tokens, at_least=0 if body.echo else 1)
    raw = split_prompts(body.prompt)
    check_count(body, len(raw), service.config.max_prompts)
    check_fields(body, service.engine.info)
    check_logprobs("logprobs", body.logprobs)
    _check_best_of(body)
    if body.suffix:
        raise not_supported("suffix", "Inserting between prompt and suffix")
    return raw


def _check_best_of(body: CompletionRequest) -> None:
    if body.best_of is None:
        return
    if not 0 <= body.best_of <= MAX_BEST_OF:
        raise bad_request(
            f"best_of must be from 0 to {MAX_BEST_OF}, got {body.best_of}.", "best_of"
        )
    if body.best_of > (body.n or 1):
        raise not_supported("best_of", "best_of above n")


def _take_off(
    service: Service, body: CompletionRequest, prompts: list[Prompt], wanted: Wanted | None
) -> Flight:
    info = service.engine.info
    asked = ("max_tokens", body.max_tokens)
    max_tokens = token_budget(prompts, info, asked, DEFAULT_COMPLETION_TOKENS)
    params = sampling_params(
        body,
        info,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        structured=None if wanted is None else wanted.grammar,
        words=words_of(service.engine, body),
    )
    if body.echo and body.logprobs is not None:
        most = max(body.logprobs, body.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=most)
    return service.take_off("cmpl", prompts, params)


def _echo(service: Service, body: CompletionRequest, prompt: Prompt) -> str:
    if not body.echo:
        return ""
    return service.engine.decode(prompt.token_ids) if prompt.text is None else prompt.text
