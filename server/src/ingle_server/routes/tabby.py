"""What TabbyAPI's clients look up before they ask: the model in hand, all models, tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.di import NamedDependency

from ingle_server.body import read_json
from ingle_server.errors import bad_request
from ingle_server.prompts import check_ids, check_text_length
from ingle_server.routes.models import model_list
from ingle_server.schemas.models import ModelList
from ingle_server.schemas.tabby import (
    TabbyCard,
    TabbyDecodeRequest,
    TabbyEncodeRequest,
    TabbyParameters,
    TabbyText,
    TabbyTokens,
)
from ingle_server.service import Service

_ENCODE = msgspec.json.Decoder(TabbyEncodeRequest)
_DECODE = msgspec.json.Decoder(TabbyDecodeRequest)


@get("/v1/model")
async def current_model(service: NamedDependency[Service]) -> Response[TabbyCard]:
    """The model in memory."""
    loaded = service.loaded
    info = loaded.engine.info
    return Response(
        TabbyCard(
            id=loaded.entry.name,
            created=service.started,
            parameters=TabbyParameters(max_seq_len=info.max_model_len),
        )
    )


@get("/v1/model/list")
async def tabby_models(service: NamedDependency[Service]) -> Response[ModelList]:
    """Every name of every model, as ``/v1/models``."""
    return Response(model_list(service))


@post("/v1/token/encode", status_code=200)
async def encode_tokens(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[TabbyTokens]:
    """A text's tokens."""
    config = service.config
    body = await read_json(request, _ENCODE, config.max_body_bytes, config.header_timeout)
    check_text_length(len(body.text), service.engine.info, "text")
    special = body.add_bos_token is not False
    tokens = await service.off_loop(
        len(body.text), lambda: service.engine.encode(body.text, add_special_tokens=special)
    )
    return Response(TabbyTokens(tokens=tokens, length=len(tokens)))


@post("/v1/token/decode", status_code=200)
async def decode_tokens(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[TabbyText]:
    """Tokens' text."""
    config = service.config
    body = await read_json(request, _DECODE, config.max_body_bytes, config.header_timeout)
    if len(body.tokens) > service.engine.info.max_model_len:
        raise bad_request(f"tokens holds {len(body.tokens)} ids, more than the context.", "tokens")
    check_ids(body.tokens, service.engine.info, "tokens")
    skip = body.decode_special_tokens is False
    text = await service.off_loop(
        len(body.tokens), lambda: service.engine.decode(body.tokens, skip_special_tokens=skip)
    )
    return Response(TabbyText(text=text))
