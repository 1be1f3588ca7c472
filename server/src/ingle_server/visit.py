"""One HTTP request's stay: it holds the model it talks to from its first look to its last byte."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request

from ingle_server.body import read_body
from ingle_server.service import Service

COMPUTE_NOTHING = ("/abort", "/check", "/cancel", "/api/show")
"""Ends of paths that only talk of requests under way, or of models wherever they are: they must
not wait for a model."""


class _Named(msgspec.Struct):
    """The one field of a request that says which model it wants."""

    model: str | None = None


_DECODER = msgspec.json.Decoder(_Named)


class Visit:
    """Made for every request; ``close`` ends it, however the request ended."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bound: Service | None = None

    async def service(self, request: Request[Any, Any, Any]) -> Service:
        """What the request's route works with: bound to its model when it may compute something.

        Raises:
            ApiError: 503 when no model is loaded; 408 or 413 for the body.
        """
        if request.method != "POST" or request.scope["path"].endswith(COMPUTE_NOTHING):
            return self._service
        if self._bound is None:
            models = self._service.models
            name = await self._wanted(request) if len(models.entries) > 1 else None
            self._bound = self._service.bound(await models.lease(name))
        return self._bound

    def close(self) -> None:
        """Gives the model back."""
        if self._bound is not None:
            self._bound = None
            self._service.models.release()

    async def _wanted(self, request: Request[Any, Any, Any]) -> str | None:
        """The model the body names. What is wrong with the body is the route's to say."""
        config = self._service.config
        body = await read_body(request, config.max_body_bytes, config.header_timeout)
        try:
            name = _DECODER.decode(body).model
        except (msgspec.DecodeError, RecursionError):
            return None
        # Ollama's clients put a tag behind the name.
        short = name and name.removesuffix(":latest")
        return short if short and self._service.models.find(short) else name


async def provide_service(request: Request[Any, Any, Any]) -> Service:
    """The dependency ``service`` of every route."""
    visit: Visit = request.scope["state"]["visit"]
    return await visit.service(request)
