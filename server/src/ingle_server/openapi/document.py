"""Puts the document together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.routes import BaseRoute, HTTPRoute

from ingle_server import __version__
from ingle_server.config import ServerConfig
from ingle_server.error_shapes import door_of
from ingle_server.gate import is_open
from ingle_server.openapi.operations import EVENTS, JSON, OPERATIONS, Json, Operation
from ingle_server.openapi.refusals import error_schemas, refusals

_REFERENCE = "#/components/schemas/{name}"
_ABOUT = """Every path but `/health`, `/version` and the page needs the API key, if there is one.
Unknown fields are ignored and null is as good as absent. Ranges that the schemas do not state are
in the error messages. Every answer has `x-request-id`; every path answers OPTIONS too."""


class _Entry(NamedTuple):
    """One operation of the document."""

    route: HTTPRoute
    method: str
    handler: HTTPRouteHandler

    @property
    def name(self) -> str:
        return self.handler.fn.__name__

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]


def build_document(routes: Iterable[BaseRoute], config: ServerConfig) -> Json:
    """The OpenAPI 3.1 document of ``routes``.

    Raises:
        KeyError: A handler is not in the table of operations.
    """
    entries = sorted(_entries(routes), key=lambda entry: (entry.route.path_format, entry.method))
    schemas = _Schemas(entry.operation for entry in entries)
    num_uses = Counter(entry.name for entry in entries)
    paths: dict[str, Json] = {}
    for entry in entries:
        item = paths.setdefault(entry.route.path_format, {})
        item[entry.method.lower()] = {
            "operationId": _id(entry, is_alone=num_uses[entry.name] == 1),
            **_operation(entry, schemas, keyed=bool(config.api_key)),
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ingle", "version": __version__, "description": _ABOUT},
        "servers": [{"url": config.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": _security_schemes()},
    }


def _entries(routes: Iterable[BaseRoute]) -> Iterator[_Entry]:
    for route in routes:
        if isinstance(route, HTTPRoute):
            for method, (handler, _) in route.route_handler_map.items():
                if method != "OPTIONS":  # the framework's own
                    yield _Entry(route, method, handler)


class _Schemas:
    """JSON Schemas of everything the operations read and write, from the structs."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        known = list(operations)
        bodies = _distinct(each.body for each in known)
        answers = _distinct(kind for each in known for kind in (each.answer, each.frame))
        read, read_parts = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
        written, parts = msgspec.json.schema_components(answers, ref_template=_REFERENCE)
        for part in parts.values():
            _require_defaults(part)
        self.components = {**read_parts, **parts, **error_schemas()}
        self._of = dict(zip(map(repr, [*bodies, *answers]), [*read, *written], strict=True))

    def of(self, kind: Any) -> Json:
        """The schema of a type: a reference where it is a struct."""
        return self._of[repr(kind)]


def _distinct(kinds: Iterable[Any]) -> list[Any]:
    found = {repr(kind): kind for kind in kinds if kind is not None}
    return [found[name] for name in sorted(found)]


def _require_defaults(schema: Json) -> None:
    """In an answer a field with a default is always there; one that may be left out has none."""
    properties = schema.get("properties", {})
    always = [name for name, each in properties.items() if "default" in each]
    schema["required"] = [*schema.get("required", []), *always]


def _id(entry: _Entry, *, is_alone: bool) -> str:
    if is_alone:
        return entry.name
    words = entry.route.path_format.strip("/").replace("/", "_")
    return f"{entry.name}_{entry.method.lower()}_{words}"


def _operation(entry: _Entry, schemas: _Schemas, *, keyed: bool) -> Json:
    operation, path, method = entry.operation, entry.route.path_format, entry.method
    said: Json = {
        "tags": [door_of(path)],
        "summary": (entry.handler.fn.__doc__ or entry.name).partition("\n\n")[0].strip(),
        "security": _security(path, operation, keyed=keyed),
        "parameters": _parameters(entry),
        "responses": {"200": _success(entry, schemas), **refusals(path, method, operation)},
    }
    if operation.body is not None and method != "GET":
        said["requestBody"] = {
            "required": operation.body_required,
            "content": {JSON: {"schema": schemas.of(operation.body)}},
        }
    return said


def _success(entry: _Entry, schemas: _Schemas) -> Json:
    operation = entry.operation
    said = "OK"
    content: Json = {kind: {"schema": {"type": "string"}} for kind in operation.media}
    if operation.answer is not None:
        content[JSON] = {"schema": schemas.of(operation.answer)}
    if operation.streams is not None:
        said += (
            ", or a stream of events" if operation.streams == EVENTS else ", or objects in lines"
        )
        # OpenAPI 3.1 has no word for what each part of a stream is.
        frame = operation.frame
        content[operation.streams] = {} if frame is None else {"x-event": schemas.of(frame)}
    return {"description": said, **({"content": content} if content else {})}


def _parameters(entry: _Entry) -> list[Json]:
    in_path = [
        {"name": part.name, "in": "path", "required": True, "schema": {"type": "string"}}
        for part in entry.route.path_components
        if not isinstance(part, str)
    ]
    in_query = [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in entry.operation.query.items()
    ]
    return in_path + in_query


def _security(path: str, operation: Operation, *, keyed: bool) -> list[Json]:
    """Which of the schemes let a request in; the empty one means that none is needed."""
    if is_open(path):
        return []
    if operation.is_admin:
        return [{"bearer": []}, {"adminKey": []}]
    return [{"bearer": []}, {"apiKey": []}, *([] if keyed else [{}])]


def _security_schemes() -> Json:
    return {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "adminKey": {"type": "apiKey", "in": "header", "name": "x-admin-key"},
    }
