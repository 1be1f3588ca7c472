"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, post
from litestar.di import NamedDependency

from ingle_server.body import read_json
from ingle_server.chat_call import generation_prompt
from ingle_server.chat_features import check_template
from ingle_server.engine_client import ChatPrompt
from ingle_server.errors import bad_request
from ingle_server.messages import check_tools, template_messages
from ingle_server.prompts import check_ids, check_text_length, encode_chat
from ingle_server.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from ingle_server.service import Service

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


@post(["/tokenize", "/v1/tokenize"], status_code=200)
async def tokenize(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[TokenizeResponse]:
    """The token ids of a text or a conversation."""
    config = service.config
    body = await read_json(request, _TOKENIZE, config.max_body_bytes, config.header_timeout)
    if body.model is not None:
        service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    tokens = await (
        _tokenize_text(service, body) if body.messages is None else _tokenize_chat(service, body)
    )
    strs = [service.engine.decode([token]) for token in tokens] if body.return_token_strs else None
    return Response(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=service.engine.info.max_model_len,
            tokens=tokens,
            token_strs=strs,
        )
    )


async def _tokenize_text(service: Service, body: TokenizeRequest) -> list[int]:
    text = body.prompt or ""
    check_text_length(len(text), service.engine.info, "prompt")
    special = True if body.add_special_tokens is None else body.add_special_tokens
    return await service.off_loop(
        len(text), lambda: service.engine.encode(text, add_special_tokens=special)
    )


async def _tokenize_chat(service: Service, body: TokenizeRequest) -> list[int]:
    check_tools(body.tools)
    check_template(body.chat_template, body.chat_template_kwargs)
    messages = template_messages(body.messages or [])
    tools = msgspec.to_builtins(body.tools) if body.tools else None
    chat = ChatPrompt(
        messages=messages if tools is None else service.reading.with_tools(messages, tools),
        tools=tools,
        add_generation_prompt=generation_prompt(
            body.add_generation_prompt, body.continue_final_message
        ),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )
    return await encode_chat(service, chat)


@post(["/detokenize", "/v1/detokenize"], status_code=200)
async def detokenize(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[DetokenizeResponse]:
    """The text of token ids."""
    config = service.config
    body = await read_json(request, _DETOKENIZE, config.max_body_bytes, config.header_timeout)
    if body.model is not None:
        service.check_model(body.model)
    check_ids(body.tokens, service.engine.info, "tokens")
    text = await service.off_loop(len(body.tokens), lambda: service.engine.decode(body.tokens))
    return Response(DetokenizeResponse(prompt=text))
