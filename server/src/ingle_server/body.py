"""Reads a request body: limits, content type, strict JSON. Every fault is a 4xx of OpenAI shape."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from litestar import Request

from ingle_server.errors import ApiError, bad_request, shorten, shown

T = TypeVar("T")

MAX_DISCARDED = 256 * 1024 * 1024
"""Bytes of a body over the limit that are still read, so that the client hears why."""

_FIELD_BEFORE = re.compile(rb'"([A-Za-z_]+)"\s*:\s*-?$')
_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})")
_NO_NUMBER = re.compile(rb"NaN|Infinity")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")


async def read_json(
    request: Request[Any, Any, Any], decoder: msgspec.json.Decoder[T], limit: int, seconds: float
) -> T:
    """The body, decoded. ``limit`` is in bytes; the client has ``seconds`` to send it.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    _check_content_type(request)
    return decode(await read_body(request, limit, seconds), decoder)


_CLOSE = {"connection": "close"}
"""The rest of such a body may never come: nothing can follow it on its connection."""


async def read_body(request: Request[Any, Any, Any], limit: int, seconds: float) -> bytes:
    """The body's bytes; asked again, the same ones.

    Raises:
        ApiError: 408 or 413.
    """
    known: bytes | None = request.scope["state"].get("body")
    if known is not None:
        return known
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, limit)
    except TimeoutError:
        message = f"The body did not arrive within {seconds:g} seconds."
        raise ApiError(408, message, headers=_CLOSE) from None
    request.scope["state"]["body"] = body
    return body


def _check_content_type(request: Request[Any, Any, Any]) -> None:
    value = request.headers.get("content-type", "application/json")
    media_type = value.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {shown(value)}.")


async def _read(request: Request[Any, Any, Any], limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit and "expect" in request.headers:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in _chunks(request):
        size += len(chunk)
        if size > limit + MAX_DISCARDED:
            break
        if size > limit:
            chunks.clear()
        else:
            chunks.append(chunk)
    if size > limit:
        raise _too_large(limit)
    return b"".join(chunks)


async def _chunks(request: Request[Any, Any, Any]) -> Any:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise client_gone()
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def client_gone() -> ApiError:
    """What a handler ends with when nobody reads the answer any more."""
    return ApiError(499, "The client closed the connection.")


def _too_large(limit: int) -> ApiError:
    message = f"The request body is larger than the limit of {limit} bytes."
    return ApiError(413, message, headers=_CLOSE)


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """``body`` as the decoder's type.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(body, str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except RecursionError:
        raise bad_request("The body is not valid JSON: nested too deeply.") from None


def _wrong_type(body: bytes, message: str) -> ApiError:
    """Turns ``Expected `int | null`, got `str` - at `$.n``` into a sentence about ``n``."""
    at = _AT.search(message)
    path = at[1] if at else ""
    said = _AT.sub("", message).replace("`", "").replace(" | ", " or ")
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
        return bad_request(f"{path} is required.", _param(path))
    if not path:
        return bad_request(f"The body must be a JSON object: {_lower(said)}.")
    value = _value_at(body, path)
    seen = f" ({shown(value)})" if value is not None else _unreadable_number(body, path)
    return bad_request(f"{path}: {_lower(said)}{seen}.", _param(path))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _param(path: str) -> str:
    """Errors name the top-level field; inside ``messages`` they name the place exactly."""
    return path if path.startswith("messages") else re.split(r"[.\[]", path, maxsplit=1)[0]


def _value_at(body: bytes, path: str) -> Any:
    """The value at ``path`` (``messages[0].role``), or None when it cannot be had."""
    try:
        value: Any = msgspec.json.decode(body)
        for name, index in _STEP.findall(path.removesuffix("[...]")):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return None
    return value


def _unreadable_number(body: bytes, path: str) -> str:
    """`` (1e999)`` for a number too large to be read, as far as it can be found by its field."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0].encode()
    found = re.search(rb'"%b"\s*:[^,}]{0,40}?(-?\d+(?:\.\d+)?[eE]\+?\d+)' % name, body)
    return f" ({shorten(found[1].decode())})" if found else ""


def _malformed(body: bytes, message: str) -> ApiError:
    if not body.strip():
        return bad_request("The body is empty; it must be a JSON object.")
    if "UTF-8" in message:
        return bad_request("The body is not valid JSON: it holds bytes that are not UTF-8.")
    if "surrogate" in message or ("truncated" in message and _SURROGATE.search(body)):
        return bad_request("The body is not valid JSON: it escapes half of a surrogate pair.")
    found = _BYTE.search(message)
    at = int(found[1]) if found else 0
    field = _FIELD_BEFORE.search(body[max(0, at - 80) : at])
    param = field[1].decode() if field else None
    literal = _NO_NUMBER.match(body, at)
    if param and literal:
        sign = "-" if body[at - 1 : at] == b"-" else ""
        value = sign + literal[0].decode()
        return bad_request(f"{param} must be a finite number, got {value}.", param)
    said = _lower(message.removeprefix("JSON is malformed: "))
    where = f" in {param}" if param else ""
    return bad_request(f"The body is not valid JSON{where}: {said}.", param)
