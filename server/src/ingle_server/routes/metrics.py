"""``GET /metrics``."""

from __future__ import annotations

from litestar import Response, get
from litestar.di import NamedDependency
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from ingle_server.service import Service


@get("/metrics")
async def metrics(service: NamedDependency[Service]) -> Response[bytes]:
    """Prometheus' text format."""
    media_type = CONTENT_TYPE_PLAIN_0_0_4.partition("; charset")[0]  # the framework adds it
    return Response(service.metrics.render(), media_type=media_type)
