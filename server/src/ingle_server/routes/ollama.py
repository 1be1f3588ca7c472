"""Ollama's ``/api``: tags, show, ps, version, chat and generate."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle import IngleError, __version__
from ingle_server.body import read_json
from ingle_server.chat_call import ChatCall, begin_chat
from ingle_server.completion_call import begin_completion
from ingle_server.engine_client import ModelInfo
from ingle_server.error_shapes import renamed
from ingle_server.errors import ApiError, bad_request, to_api_error
from ingle_server.model_entry import ModelEntry
from ingle_server.ollama.answer import WIRE, OllamaAnswer, message_body, now, response_body
from ingle_server.ollama.translate import (
    OPTION_NAMES,
    chat_request,
    check_generate,
    find_entry,
    generate_as_chat,
    model_name,
    raw_completion,
)
from ingle_server.outputs import collect
from ingle_server.plain import unless_client_leaves
from ingle_server.schemas.ollama import (
    Frame,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from ingle_server.service import Service
from ingle_server.streaming import stream_response
from ingle_server.tools.answer import AnswerReader
from ingle_server.translate import LENIENT

_CHAT = msgspec.json.Decoder(OllamaChatRequest)
_GENERATE = msgspec.json.Decoder(OllamaGenerateRequest)
_SHOW = msgspec.json.Decoder(OllamaShowRequest)


@get("/api/version")
async def ollama_version() -> Response[Frame]:
    """Ingle's version."""
    return Response({"version": __version__})


@get("/api/tags")
async def ollama_tags(service: NamedDependency[Service]) -> Response[Frame]:
    """Every name of every model, whether in memory or not."""
    entries = service.models.entries
    return Response({"models": [_model(service, e, name) for e in entries for name in e.names]})


@get("/api/ps")
async def ollama_ps(service: NamedDependency[Service]) -> Response[Frame]:
    """What is in memory: one model, or none."""
    loaded = service.models.current
    if loaded is None:
        return Response({"models": []})
    more = {
        "expires_at": "2318-01-01T00:00:00Z",
        "size_vram": 0,
        "context_length": loaded.engine.info.max_model_len,
    }
    return Response({"models": [_model(service, loaded.entry, loaded.entry.name) | more]})


@post("/api/show", status_code=200)
async def ollama_show(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[Frame]:
    """What is known of a model: less before it was first in memory."""
    config = service.config
    body = await read_json(request, _SHOW, config.max_body_bytes, config.header_timeout)
    name = body.model or body.name
    if name is None:
        raise bad_request("model is required.", "model")
    entry = find_entry(service, name)
    return Response(_shown(service, entry, service.models.info(entry)))


def _shown(service: Service, entry: ModelEntry, info: ModelInfo | None) -> Frame:
    sizes = {}
    if info is not None:
        sizes = {
            "ingle.context_length": info.max_model_len,
            "ingle.vocab_size": info.vocab_size,
        }
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "" if info is None else info.chat_template,
        "details": _details(),
        "model_info": {
            "general.architecture": "ingle",
            "general.basename": entry.name,
            **sizes,
        },
        "capabilities": [
            "completion",
            *(["tools"] if info is not None and info.has_chat_template else []),
        ],
        "modified_at": _started(service),
    }


@post("/api/chat", status_code=200)
async def ollama_chat(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """One answer to a conversation, as lines unless ``stream`` is false."""
    config = service.config
    body = await read_json(request, _CHAT, config.max_body_bytes, config.header_timeout)
    model = model_name(service, body.model)
    if not body.messages:
        return _loaded(body.model, message_body("", "", []))
    try:
        call = await begin_chat(service, chat_request(model, body), "ollama", LENIENT)
    except (ApiError, IngleError) as error:
        raise renamed(to_api_error(error), OPTION_NAMES) from None
    answer = OllamaAnswer(call, body.model, message_body)
    return await _answer(request, service, call, (answer, body.stream is not False))


@post("/api/generate", status_code=200)
async def ollama_generate(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """A prompt's answer, or its continuation when ``raw``."""
    config = service.config
    body = await read_json(request, _GENERATE, config.max_body_bytes, config.header_timeout)
    model = model_name(service, body.model)
    check_generate(body)
    if not body.prompt:
        return _loaded(body.model, {"response": ""})
    try:
        call = await _begin_generate(service, model, body)
    except (ApiError, IngleError) as error:
        raise renamed(to_api_error(error), {**OPTION_NAMES, "messages": "prompt"}) from None
    answer = OllamaAnswer(call, body.model, response_body)
    return await _answer(request, service, call, (answer, body.stream is not False))


async def _begin_generate(service: Service, model: str, body: OllamaGenerateRequest) -> ChatCall:
    if service.engine.info.has_chat_template and not body.raw:
        return await begin_chat(service, generate_as_chat(model, body), "ollama", LENIENT)
    flight = await begin_completion(service, raw_completion(model, body), "ollama", LENIENT)
    return ChatCall(flight=flight, new_reader=lambda: AnswerReader(None, None))


async def _answer(
    request: Request[Any, Any, Any],
    service: Service,
    call: ChatCall,
    how: tuple[OllamaAnswer, bool],
) -> ASGIResponse:
    answer, streamed = how
    if streamed:
        return await stream_response(service, call.flight, answer, WIRE)
    try:
        work = collect(call.flight, answer.follower.usage)
        (collected,) = await unless_client_leaves(request, work)
    finally:
        service.land(call.flight)
    return _json(answer.whole(collected))


def _loaded(model: str, body: Frame) -> ASGIResponse:
    """The answer to a request that only wants the model in memory, where it is."""
    end = {"done": True, "done_reason": "load"}
    return _json({"model": model, "created_at": now(), **body, **end})


def _json(frame: Frame) -> ASGIResponse:
    return ASGIResponse(body=msgspec.json.encode(frame), media_type="application/json")


def _model(service: Service, entry: ModelEntry, name: str) -> Frame:
    return {
        "name": name,
        "model": name,
        "modified_at": _started(service),
        "size": entry.num_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(),
    }


def _details() -> Frame:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "ingle",
        "families": ["ingle"],
        "parameter_size": "",
        "quantization_level": "",
    }


def _started(service: Service) -> str:
    return datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
