"""Checks API keys without telling, by its timing, how much of a key was right."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping

from ingle_server.errors import ApiError


class KeyRing:
    """The accepted keys, as SHA-256 digests; an empty ring accepts everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether the header holds one of the keys; an empty ring accepts nobody here."""
        scheme, _, key = (authorization or b"").partition(b" ")
        return scheme.lower() == b"bearer" and self._holds(key)

    def check(self, authorization: bytes | None, x_api_key: bytes | None = None) -> None:
        """Lets a request with this ``Authorization`` header pass, or with this ``x-api-key``,
        which Anthropic's clients send instead.

        Raises:
            ApiError: 401 when the header is missing or wrong.
        """
        if not self._digests:
            return
        if authorization is None and x_api_key is not None:
            authorization = b"Bearer " + x_api_key
        if authorization is None:
            raise _unauthorized("No API key given: send it as Authorization: Bearer KEY.")
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise _unauthorized("The API key must be sent as Authorization: Bearer KEY.")
        if not self._holds(key):
            raise _unauthorized("The API key is wrong.")

    def _holds(self, key: bytes) -> bool:
        given = _digest(key.strip())
        # Every key is compared, so that the time does not tell which one was close.
        matches = [secrets.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def admin_authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The admin key a request brings, as an ``Authorization`` header: ``X-Admin-Key`` wins."""
    key = headers.get(b"x-admin-key")
    return headers.get(b"authorization") if key is None else b"Bearer " + key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
