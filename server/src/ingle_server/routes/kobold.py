"""Kobold's ``/api/v1`` (also as ``/api/latest``) and KoboldCpp's ``/api/extra``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import HttpMethod, Request, Response, get, post, route
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle import IngleError, __version__
from ingle_server.body import read_json
from ingle_server.completion_call import begin_completion
from ingle_server.error_shapes import renamed
from ingle_server.errors import ApiError, to_api_error
from ingle_server.kobold.frames import KoboldFrames
from ingle_server.kobold.generations import Generation
from ingle_server.kobold.translate import DEFAULT_LENGTH, FIELD_NAMES, completion_request
from ingle_server.plain import unless_client_leaves
from ingle_server.prompts import check_text_length
from ingle_server.schemas.kobold import Body, KoboldKey, KoboldRequest, KoboldText
from ingle_server.service import Service
from ingle_server.streaming import stream_response
from ingle_server.translate import LENIENT

_REQUEST = msgspec.json.Decoder(KoboldRequest)
_KEY = msgspec.json.Decoder(KoboldKey)
_TEXT = msgspec.json.Decoder(KoboldText)
KOBOLD_API = "1.2.5"
"""The version of Kobold's API that this is."""
KOBOLDCPP = "1.100"
"""The version of KoboldCpp whose extras these are; clients look whether it can stream."""


@post(["/api/v1/generate", "/api/latest/generate"], status_code=200)
async def kobold_generate(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """A prompt's continuation; what there is of it when it is aborted."""
    generation = await _begin(request, service)
    try:
        body = await unless_client_leaves(request, generation.finish())
    finally:
        generation.is_over = True
        service.land(generation.flight)
    return ASGIResponse(body=msgspec.json.encode(body), media_type="application/json")


@post("/api/extra/generate/stream", status_code=200)
async def kobold_stream(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """The same as server-sent events."""
    generation = await _begin(request, service)
    frames = KoboldFrames(generation)
    return await stream_response(service, generation.flight, frames, frames.wire)


@route("/api/extra/generate/check", http_method=[HttpMethod.GET, HttpMethod.POST], status_code=200)
async def kobold_check(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[Body]:
    """The text so far."""
    key = await _key(request, service)
    return Response({"results": [{"text": text} for text in service.generations.texts(key)]})


@post("/api/extra/abort", status_code=200)
async def kobold_abort(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[Body]:
    """Ends a generation."""
    was_running = service.generations.abort(await _key(request, service))
    return Response({"success": "true" if was_running else "false", "done": "true"})


@post("/api/extra/tokencount", status_code=200)
async def kobold_tokencount(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> Response[Body]:
    """A text's tokens."""
    config = service.config
    body = await read_json(request, _TEXT, config.max_body_bytes, config.header_timeout)
    check_text_length(len(body.prompt), service.engine.info, "prompt")
    special = body.special is not False
    ids = await service.off_loop(
        len(body.prompt), lambda: service.engine.encode(body.prompt, add_special_tokens=special)
    )
    return Response({"value": len(ids), "ids": ids})


@get(
    [
        "/api/v1/config/max_context_length",
        "/api/latest/config/max_context_length",
        "/api/extra/true_max_context_length",
    ]
)
async def kobold_context(service: NamedDependency[Service]) -> Response[Body]:
    """Tokens of prompt and continuation together."""
    return Response({"value": service.engine.info.max_model_len})


@get(["/api/v1/config/max_length", "/api/latest/config/max_length"])
async def kobold_length() -> Response[Body]:
    """Tokens of a continuation whose request says nothing of it."""
    return Response({"value": DEFAULT_LENGTH})


@get(["/api/v1/config/soft_prompt", "/api/latest/config/soft_prompt"])
async def kobold_soft_prompt() -> Response[Body]:
    """None."""
    return Response({"value": ""})


@get(["/api/v1/config/soft_prompts_list", "/api/latest/config/soft_prompts_list"])
async def kobold_soft_prompts() -> Response[Body]:
    """None."""
    return Response({"values": []})


@get(["/api/v1/model", "/api/latest/model"])
async def kobold_model(service: NamedDependency[Service]) -> Response[Body]:
    """The model's name."""
    return Response({"result": service.names[0]})


@get(["/api/v1/info/version", "/api/latest/info/version"])
async def kobold_api_version() -> Response[Body]:
    """The version of the API."""
    return Response({"result": KOBOLD_API})


@get("/api/extra/version")
async def kobold_version(service: NamedDependency[Service]) -> Response[Body]:
    """What can be asked."""
    return Response(
        {
            "result": "KoboldCpp",
            "version": KOBOLDCPP,
            "ingle_version": __version__,
            "protected": bool(service.config.api_key),
            "txt2img": False,
            "vision": False,
            "transcribe": False,
            "multiplayer": False,
            "websearch": False,
            "tts": False,
        }
    )


@get("/api/extra/perf")
async def kobold_perf(service: NamedDependency[Service]) -> Response[Body]:
    """How busy the engine is."""
    stats = service.engine.stats()
    return Response(
        {
            "queue": stats.num_requests_waiting,
            "idle": int(stats.num_requests_running == 0),
            "total_gens": sum(stats.requests_finished_total.values()),
        }
    )


async def _begin(request: Request[Any, Any, Any], service: Service) -> Generation:
    config = service.config
    body = await read_json(request, _REQUEST, config.max_body_bytes, config.header_timeout)
    model = service.names[0]
    try:
        asked = completion_request(body, model, service.engine.info)
        flight = await begin_completion(service, asked, "kobold", LENIENT)
    except (ApiError, IngleError) as error:
        raise renamed(to_api_error(error), FIELD_NAMES) from None
    return service.generations.begin(flight, body.genkey)


async def _key(request: Request[Any, Any, Any], service: Service) -> str | None:
    """The key in the body, if there is a body."""
    config = service.config
    if request.method == "GET" or request.headers.get("content-length", "0") == "0":
        return None
    body = await read_json(request, _KEY, config.max_body_bytes, config.header_timeout)
    return body.genkey
