"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from ingle_server.schemas.models import ModelCard, ModelList
from ingle_server.service import Service


@get("/v1/models")
async def list_models(service: NamedDependency[Service]) -> Response[ModelList]:
    """Every name under which the model is served."""
    return Response(ModelList(data=[_card(service, name) for name in service.names]))


@get("/v1/models/{model_id:path}")
async def retrieve_model(
    model_id: FromPath[str], service: NamedDependency[Service]
) -> Response[ModelCard]:
    """One of them. Clients send ``a/b`` as ``a%2Fb``, which arrives as a path of two parts."""
    name = str(model_id).removeprefix("/")
    service.check_model(name)
    return Response(_card(service, name if name in service.names else service.names[0]))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.started,
        root=service.names[0],
        max_model_len=service.engine.info.max_model_len,
    )
