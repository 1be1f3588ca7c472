"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle_server.body import read_json
from ingle_server.chat_features import check_features, served_tools
from ingle_server.chat_frames import ChatFrames, ChatShape, whole_chat
from ingle_server.engine_client import ChatPrompt
from ingle_server.errors import bad_request
from ingle_server.flight import Flight, Prompt
from ingle_server.logprobs import TokenNamer
from ingle_server.messages import template_messages
from ingle_server.outputs import UsageCounter, collect
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.prompts import render_chat
from ingle_server.schemas.chat import ChatCompletionRequest
from ingle_server.service import Service
from ingle_server.streaming import stream_response
from ingle_server.structured import Wanted, check_grammar, wanted_output
from ingle_server.tools.plan import tool_plan
from ingle_server.translate import (
    check_count,
    check_fields,
    check_logprobs,
    check_max_tokens,
    sampling_params,
    token_budget,
)
from ingle_server.words import words_of

_DECODER = msgspec.json.Decoder(ChatCompletionRequest)


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """One answer of the model to a conversation, whole or as server-sent events."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    chat = check(service, body)
    plan = tool_plan(body)
    wanted = plan.wanted or wanted_output(body, body.response_format)
    await check_grammar(service.engine, wanted)
    prompt = await render_chat(service, chat, body, asked_tokens(body)[1])
    flight = _take_off(service, body, prompt, wanted)
    shape = ChatShape(
        request=body,
        flight=flight,
        namer=TokenNamer(service.engine, as_ids=bool(body.return_tokens_as_token_ids)),
        created=int(time.time()),
        new_reader=service.reading.reader_factory(plan, prompt.token_ids),
    )
    usage = UsageCounter(flight.num_prompt_tokens)
    if body.stream:
        return await stream_response(service, flight, ChatFrames(shape, usage))
    try:
        collected = await unless_client_leaves(request, collect(flight, usage))
    finally:
        service.land(flight)
    return json_response(whole_chat(shape, collected, usage.usage()))


def check(service: Service, body: ChatCompletionRequest) -> ChatPrompt:
    """Checks every field, and gives the conversation to render.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    service.check_model(body.model)
    service.check_alive()
    field, asked = asked_tokens(body)
    check_max_tokens(field, asked, at_least=1)
    check_count(body, 1, service.config.max_prompts)
    check_fields(body, service.engine.info)
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    check_features(body)
    messages = template_messages(body.messages)
    if not service.engine.info.has_chat_template:
        raise bad_request("The model has no chat template; use /v1/completions.", "messages")
    served = served_tools(body)
    tools = None if served is None else msgspec.to_builtins(served)
    return ChatPrompt(
        messages=messages if tools is None else service.reading.with_tools(messages, tools),
        tools=tools,
        add_generation_prompt=generation_prompt(
            body.add_generation_prompt, body.continue_final_message
        ),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


def generation_prompt(asked: bool | None, continue_final_message: bool | None) -> bool:
    """Whether to open the assistant's turn: as asked, else unless the last one is to go on."""
    return not continue_final_message if asked is None else asked


def asked_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """(field, value) of the limit that counts: the newer name wins."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _take_off(
    service: Service, body: ChatCompletionRequest, prompt: Prompt, wanted: Wanted | None
) -> Flight:
    info = service.engine.info
    max_tokens = token_budget([prompt], info, asked_tokens(body), None)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(
        body,
        info,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured=None if wanted is None else wanted.grammar,
        words=words_of(service.engine, body),
    )
    if service.reading.needs_special_tokens(tool_plan(body)):
        params = replace(params, skip_special_tokens=False)
    return service.take_off("chatcmpl", [prompt], params)
