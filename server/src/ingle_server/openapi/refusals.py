"""The error answers of the document: which statuses an operation has, in which shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ingle_server.error_shapes import Door, door_of
from ingle_server.gate import DRAINING_PATHS, is_open
from ingle_server.openapi.operations import JSON, Json, Operation
from ingle_server.visit import COMPUTE_NOTHING

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(properties: dict[str, Any]) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def error_schemas() -> dict[str, Json]:
    """One schema per door, by name."""
    openai = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
    named = {"type": _TEXT, "message": _TEXT}
    return {
        _NAMES["openai"]: _object({"error": _object(openai)}),
        _NAMES["anthropic"]: _object({"type": {"const": "error"}, "error": _object(named)}),
        _NAMES["ollama"]: _object({"error": _TEXT}),
        _NAMES["kobold"]: _object({"detail": _object({"msg": _TEXT, "type": _TEXT})}),
    }


def refusals(path: str, method: str, operation: Operation) -> dict[str, Json]:
    """Every status other than success that ``operation`` answers with, and its body."""
    shape = {"$ref": f"#/components/schemas/{_NAMES[door_of(path)]}"}
    content = {} if method == "HEAD" else {"content": {JSON: {"schema": shape}}}
    return {
        str(status): {"description": HTTPStatus(status).phrase, **content}
        for status in sorted(_statuses(path, method, operation))
    }


def _statuses(path: str, method: str, operation: Operation) -> set[int]:
    statuses = {403, 431, 500, *operation.statuses}  # 403: a foreign Host, or no admin key
    if not is_open(path):
        statuses.add(401)
    if path not in DRAINING_PATHS or path == "/health":
        statuses.add(503)
    if "{" in path:
        statuses |= {404, 414}
    if operation.body is not None and method != "GET":
        statuses |= {400, 408, 413, 415}
    if operation.names_model:
        statuses.add(404)
    if method == "POST" and not path.endswith(COMPUTE_NOTHING):
        statuses.add(429)
    return statuses


_NAMES: dict[Door, str] = {
    "openai": "Error",
    "anthropic": "AnthropicError",
    "ollama": "OllamaError",
    "kobold": "KoboldError",
}
