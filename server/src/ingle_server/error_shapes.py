"""Errors as the clients of each door read them; ``errors.py`` says what they are."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from ingle_server.errors import MAX_MESSAGE, ApiError, shorten

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_KOBOLD_TYPES = {404: "not_found", 429: "service_unavailable", 503: "service_unavailable"}
_OLLAMA = re.compile(r"/api/(tags|show|chat|generate|version|ps|embed|embeddings)/?")
_KOBOLD = ("/api/v1/", "/api/latest/", "/api/extra/")


Door = Literal["openai", "anthropic", "ollama", "kobold"]


def door_of(path: str) -> Door:
    """Whose clients ask on ``path`` (without the operator's prefix)."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if _OLLAMA.fullmatch(path):
        return "ollama"
    return "kobold" if path.startswith(_KOBOLD) else "openai"


def error_body(path: str, error: ApiError) -> bytes:
    """The JSON body of ``error`` on ``path`` (without the operator's prefix)."""
    door = door_of(path)
    if door == "anthropic":
        return msgspec.json.encode(anthropic_error(error))
    if door == "ollama":
        return msgspec.json.encode(ollama_error(error))
    if door == "kobold":
        return msgspec.json.encode(kobold_error(error))
    return error.encode()


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """``{"error": message}``."""
    return {"error": _message(error)}


def kobold_error(error: ApiError) -> dict[str, Any]:
    """``{"detail": {"msg", "type"}}``."""
    default = "server_error" if error.status >= 500 else "bad_input"
    kind = _KOBOLD_TYPES.get(error.status, default)
    return {"detail": {"msg": _message(error), "type": kind}}


def renamed(error: ApiError, names: dict[str, str]) -> ApiError:
    """``error`` with the fields of a chat called what this door calls them."""
    words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    message = words.sub(lambda match: names[match[1]], str(error))
    param = error.param and words.sub(lambda match: names[match[1]], error.param)
    return ApiError(
        error.status,
        message,
        param=param,
        code=error.code,
        type=error.type,
        headers=error.headers,
    )


def _message(error: ApiError) -> str:
    return shorten(str(error), MAX_MESSAGE)
