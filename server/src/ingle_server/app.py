"""Puts the routes together into one ASGI application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar import Litestar, MediaType, Request, Response
from litestar.config.cors import CORSConfig
from litestar.di import Provide
from litestar.types import ASGIApp

from ingle_server.config import ServerConfig
from ingle_server.engine_client import EngineClient
from ingle_server.error_shapes import error_body
from ingle_server.errors import to_api_error, unserved
from ingle_server.gate import Gate
from ingle_server.routes.anthropic import count_message_tokens, create_message
from ingle_server.routes.chat import create_chat_completion
from ingle_server.routes.completions import create_completion
from ingle_server.routes.embeddings import create_embeddings
from ingle_server.routes.health import health, load, version
from ingle_server.routes.kobold import (
    kobold_abort,
    kobold_api_version,
    kobold_check,
    kobold_context,
    kobold_generate,
    kobold_length,
    kobold_model,
    kobold_perf,
    kobold_soft_prompt,
    kobold_soft_prompts,
    kobold_stream,
    kobold_tokencount,
    kobold_version,
)
from ingle_server.routes.metrics import metrics
from ingle_server.routes.model_admin import load_model, unload_model
from ingle_server.routes.models import list_models, retrieve_model
from ingle_server.routes.ollama import (
    ollama_chat,
    ollama_generate,
    ollama_ps,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from ingle_server.routes.openapi import openapi_document
from ingle_server.routes.page import page, page_file
from ingle_server.routes.plugins import plugins
from ingle_server.routes.responses import (
    cancel_response,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from ingle_server.routes.tabby import (
    current_model,
    decode_tokens,
    encode_tokens,
    tabby_models,
)
from ingle_server.routes.tokens import detokenize, tokenize
from ingle_server.service import Service
from ingle_server.visit import provide_service

ROUTES = [
    cancel_response,
    count_message_tokens,
    create_chat_completion,
    create_completion,
    create_embeddings,
    create_message,
    create_response,
    current_model,
    decode_tokens,
    delete_response,
    detokenize,
    encode_tokens,
    health,
    kobold_abort,
    kobold_api_version,
    kobold_check,
    kobold_context,
    kobold_generate,
    kobold_length,
    kobold_model,
    kobold_perf,
    kobold_soft_prompt,
    kobold_soft_prompts,
    kobold_stream,
    kobold_tokencount,
    kobold_version,
    list_input_items,
    list_models,
    load,
    load_model,
    metrics,
    ollama_chat,
    ollama_generate,
    ollama_ps,
    ollama_show,
    ollama_tags,
    ollama_version,
    openapi_document,
    page,
    page_file,
    plugins,
    retrieve_model,
    retrieve_response,
    tabby_models,
    tokenize,
    unload_model,
    version,
]


def create_app(engine: EngineClient, config: ServerConfig | None = None) -> ASGIApp:
    """The application that serves ``engine``, for ``ingle serve`` or any other ASGI server."""
    return create_service_app(Service(engine, config or ServerConfig()))


def create_service_app(service: Service) -> ASGIApp:
    """The application around a service that the caller keeps."""
    config = service.config
    app = Litestar(
        route_handlers=ROUTES,
        dependencies={
            "server": Provide(lambda: service, sync_to_thread=False),  # bound to no model
            "service": Provide(provide_service),
        },
        exception_handlers={Exception: _error_handler(config.root_path)},
        cors_config=_cors(config),
        request_max_body_size=config.max_body_bytes,
        openapi_config=None,  # ours is in openapi/
        logging_config=None,
        debug=False,
    )
    return Gate(app, service)


def _error_handler(
    root_path: str,
) -> Callable[[Request[Any, Any, Any], Exception], Response[bytes]]:
    def answer(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        path = request.scope["path"].removeprefix(root_path)
        fault = unserved(error, request.method, path) or to_api_error(error)
        body = error_body(path, fault)
        return Response(
            body, status_code=fault.status, headers=fault.headers, media_type=MediaType.JSON
        )

    return answer


def _cors(config: ServerConfig) -> CORSConfig | None:
    """No CORS headers unless configured, and never with credentials."""
    if not config.allowed_origins:
        return None
    return CORSConfig(
        allow_origins=list(config.allowed_origins),
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        allow_headers=[
            "Authorization",
            "Content-Type",
            "X-Request-Id",
            "X-Api-Key",
            "Anthropic-Version",
        ],
        allow_credentials=False,
        expose_headers=["X-Request-Id"],
    )
