"""Every error body, in OpenAI's shape, from one place.

``{"error": {"message", "type", "param", "code"}}``, all four keys always. A message names the field
and the value seen (cut when long), never a traceback, a path of this machine or an address.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
)

from ingle import CapacityError, EngineDeadError, RequestError

logger = logging.getLogger("ingle.server")

MAX_SHOWN = 80
"""Characters of a client's value that an error message repeats."""
MAX_MESSAGE = 500


class ErrorDetail(msgspec.Struct, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer with a 4xx or 5xx status."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: What was wrong, the value seen, what to do.
        param: The request field at fault, or None.
        code: OpenAI's string code, or None.
        type: OpenAI's error type; by default it follows from ``status``.
        headers: Headers to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = headers or {}

    def body(self) -> ErrorBody:
        """The error as OpenAI's clients read it."""
        message = shorten(str(self), MAX_MESSAGE)
        return ErrorBody(
            error=ErrorDetail(message=message, type=self.type, param=self.param, code=self.code)
        )

    def encode(self) -> bytes:
        """``body`` as JSON."""
        return msgspec.json.encode(self.body())


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str) -> ApiError:
    """A 400 for what OpenAI or vLLM has and Ingle has not yet."""
    return ApiError(400, f"{what} is not supported yet; leave {param} out.", param=param)


def shutting_down() -> ApiError:
    """A 503 for requests that came, or were cut off, while the server stops."""
    return ApiError(503, "The server is shutting down.", headers={"retry-after": "5"})


class StepHungError(EngineDeadError):
    """A step of the engine does not return; the message may be shown to clients."""


def engine_dead(*, in_flight: bool, error: EngineDeadError | None = None) -> ApiError:
    """A 500 for a request that the engine's death cut off, a 503 for a later one."""
    reason = str(error) if isinstance(error, StepHungError) else "The engine has stopped"
    if in_flight:
        return ApiError(500, f"{reason}; the request was not completed.")
    return ApiError(503, f"{reason}; the server is about to exit.")


def generation_failed() -> ApiError:
    """A 500 for one request that failed in the engine. The reason is for the log only."""
    return ApiError(500, "The model failed on this request; the server's log has the reason.")


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    """``text`` cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shown(value: Any) -> str:
    """A client's JSON value as an error message repeats it: JSON, cut."""
    if isinstance(value, str):
        # Cut before encoding: the value may have megabytes.
        value = shorten(value)
    elif isinstance(value, list):
        value = value[:MAX_SHOWN]
    try:
        return shorten(msgspec.json.encode(value).decode())
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


def to_api_error(error: Exception) -> ApiError:
    """Any exception as an answer. What nobody foresaw is logged and becomes a bare 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, CapacityError):
        return ApiError(
            429,
            "The server has too many requests waiting; try again later.",
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"retry-after": "1"},
        )
    if isinstance(error, EngineDeadError):
        return engine_dead(in_flight=True, error=error)
    if isinstance(error, HTTPException) and error.status_code != 500:
        return _from_litestar(error)
    logger.error("Unexpected error while answering a request", exc_info=error)
    return ApiError(500, "Internal error; the server's log has the reason.")


def unserved(error: Exception, method: str, path: str) -> ApiError | None:
    """The framework's own refusal of an unknown path or a wrong method, in our words; else None."""
    if isinstance(error, NotFoundException):
        return ApiError(404, f"There is nothing at {shown(path)}; /openapi.json lists the paths.")
    if isinstance(error, MethodNotAllowedException):
        headers = dict(error.headers or {})
        allowed = headers.get("allow") or headers.get("Allow", "another method")
        return ApiError(
            405, f"{method} is not allowed on {shown(path)}; use {allowed}.", headers=headers
        )
    return None


def _from_litestar(error: HTTPException) -> ApiError:
    """The framework's other refusals in our words."""
    status = error.status_code
    return ApiError(status, f"{HTTPStatus(status).phrase}.", headers=dict(error.headers or {}))
