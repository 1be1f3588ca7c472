"""``GET /openapi.json``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle_server.service import Service


@get("/openapi.json")
async def openapi_document(
    request: Request[Any, Any, State], server: NamedDependency[Service]
) -> ASGIResponse:
    """This document, made when it is first asked for."""
    state = request.app.state
    body: bytes | None = state.get("openapi")
    if body is None:
        # Not at the top: a server that nobody asks must not pay for it at start.
        from ingle_server.openapi.document import build_document

        body = msgspec.json.encode(build_document(request.app.routes, server.config))
        state["openapi"] = body
    return ASGIResponse(body=body, media_type="application/json")
