"""``GET /health``, ``/ping``, ``/version`` and ``/load``."""

from __future__ import annotations

from litestar import Response, get, route
from litestar.di import NamedDependency

from ingle_server import __version__
from ingle_server.errors import shutting_down
from ingle_server.service import Service


@route(["/health", "/ping"], http_method=["GET", "HEAD"])
async def health(service: NamedDependency[Service]) -> Response[bytes]:
    """200 and nothing else while requests are served, 503 once the engine is dead or draining."""
    if service.draining:
        raise shutting_down()
    service.check_alive()
    return Response(b"", status_code=200)


@get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@get("/load")
async def load(service: NamedDependency[Service]) -> dict[str, int]:
    """Requests that are generating now."""
    return {"server_load": service.num_flights}
