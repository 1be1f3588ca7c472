"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from ingle_server.errors import ApiError, shorten
from ingle_server.model_entry import ModelEntry
from ingle_server.schemas.models import ModelCard, ModelList
from ingle_server.service import Service


@get("/v1/models")
async def list_models(service: NamedDependency[Service]) -> Response[ModelList]:
    """Every name of every model, whether in memory or not."""
    return Response(model_list(service))


def model_list(service: Service) -> ModelList:
    """A card for every name."""
    entries = service.models.entries
    return ModelList(
        data=[_card(service, entry, name) for entry in entries for name in entry.names]
    )


@get("/v1/models/{model_id:path}")
async def retrieve_model(
    model_id: FromPath[str], service: NamedDependency[Service]
) -> Response[ModelCard]:
    """One of them. Clients send ``a/b`` as ``a%2Fb``, which arrives as a path of two parts."""
    raw = str(model_id)
    for name in (raw.removeprefix("/"), raw):  # the path of a folder begins with the slash
        entry = service.models.find(name)
        if entry is not None:
            return Response(_card(service, entry, name if name in entry.names else entry.name))
    raise ApiError(
        404,
        f"The model `{shorten(raw.removeprefix('/'))}` does not exist; GET /v1/models lists "
        "those that do.",
        param="model",
        code="model_not_found",
    )


def _card(service: Service, entry: ModelEntry, name: str) -> ModelCard:
    info = service.models.info(entry)
    current = service.models.current
    return ModelCard(
        id=name,
        created=service.started,
        root=entry.name,
        max_model_len=None if info is None else info.max_model_len,
        loaded=current is not None and current.entry is entry,
    )
