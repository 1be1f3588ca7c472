"""``GET /v1/plugins``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Response, get
from litestar.di import NamedDependency

from ingle_server.service import Service


@get("/v1/plugins")
async def plugins(service: NamedDependency[Service]) -> Response[Mapping[str, Any]]:
    """What every plugin offers, which failed and why, and what was chosen."""
    return Response(service.engine.plugin_report())
