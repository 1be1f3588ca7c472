"""The outermost layer: what holds for every request, before any route is looked up."""

from __future__ import annotations

import re
import uuid

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from ingle_server.auth import KeyRing, admin_authorization
from ingle_server.config import ServerConfig, is_loopback
from ingle_server.error_shapes import error_body
from ingle_server.errors import ApiError, shown, shutting_down
from ingle_server.service import Service
from ingle_server.visit import Visit

OPEN_PATHS = frozenset({"/health", "/version"})
"""Answered without a key: a load balancer has none."""
PAGE_PATHS = frozenset({"", "/"})
DRAINING_PATHS = OPEN_PATHS | {"/metrics", "/load"}
"""Answered while draining."""
MAX_HEADERS = 256
MAX_PATH = 4096

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Gate:
    """Wraps the application: request id, Host, limits, key, draining, count of open requests.

    Every answer carries ``x-request-id``: the client's own when harmless, else a new one.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = KeyRing(service.config.api_key)
        self._admins = KeyRing(service.config.admin_key)
        self._hosts = allowed_hosts(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        self._take_off_prefix(scope)
        headers = dict(scope["headers"])
        send = _with_request_id(send, _request_id(headers))
        try:
            self._check(scope, headers)
        except ApiError as error:
            path = scope["path"].removeprefix(self._service.config.root_path)
            await _answer(error, error_body(path, error), send, self._cors_headers(headers))
            return
        self._service.num_open_requests += 1
        visit = Visit(self._service)
        scope["state"] = {**scope.get("state", {}), "visit": visit}
        try:
            await self._app(scope, receive, send)
        finally:
            visit.close()
            self._service.num_open_requests -= 1

    def _take_off_prefix(self, scope: HTTPScope) -> None:
        """uvicorn puts ``--root-path`` before every path, for proxies that cut it off; from one
        that does not it comes twice."""
        prefix = self._service.config.root_path
        path = scope["path"].removeprefix(prefix)
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            scope["path"] = path
            scope["raw_path"] = scope["raw_path"].removeprefix(prefix.encode())

    def _cors_headers(self, headers: dict[bytes, bytes]) -> dict[str, str]:
        """Lets pages of allowed origins read a refusal that comes before any route."""
        origins = self._service.config.allowed_origins
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or not ("*" in origins or origin in origins):
            return {}
        return {"access-control-allow-origin": origin, "vary": "Origin"}

    def _check(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"].removeprefix(self._service.config.root_path)
        if len(list(scope["headers"])) > MAX_HEADERS:
            raise ApiError(431, f"More than {MAX_HEADERS} headers.")
        if len(path) > MAX_PATH:
            raise ApiError(414, f"The path is longer than {MAX_PATH} characters.")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Of two lengths a proxy may believe the other one: that is how requests are smuggled.
            raise ApiError(
                400,
                "Content-Length and Transfer-Encoding in one request; send one of them.",
                headers={"connection": "close"},
            )
        self._check_host(headers.get(b"host", b""))
        if not is_open(path) and not self._is_preflight(scope, headers):
            self._check_key(headers)
        if self._service.draining and path not in DRAINING_PATHS:
            raise shutting_down()

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        """Lets holders of a key pass; an admin key opens everything."""
        if not self._admins.accepts(admin_authorization(headers)):
            self._keys.check(headers.get(b"authorization"), headers.get(b"x-api-key"))

    def _check_host(self, value: bytes) -> None:
        """Refuses foreign names on a loopback address: a web page that rebinds its own DNS name to
        127.0.0.1 would otherwise be served (CVE-2024-28224)."""
        if self._hosts is None or not value:
            return
        host = value.decode("latin-1").lower()
        name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".")
        if name not in self._hosts:
            raise ApiError(
                403,
                f"Host {shown(host)} is not served here: the server listens on this machine only. "
                "Use localhost or 127.0.0.1, or start it with another --host.",
            )

    def _is_preflight(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> bool:
        """Browsers send no key when they ask whether they may call."""
        return (
            bool(self._service.config.allowed_origins)
            and scope["method"] == "OPTIONS"
            and b"access-control-request-method" in headers
        )


def is_open(path: str) -> bool:
    """Whether a path needs no key: a load balancer has none, nor has the page before it is read."""
    return path in OPEN_PATHS or path in PAGE_PATHS or path.startswith("/page/")


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names a ``Host`` header may hold, or None when every one may."""
    if not is_loopback(config.host):
        return None
    return frozenset({"localhost", "127.0.0.1", "::1", config.host.lower()})


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _with_request_id(send: Send, request_id: bytes) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
        await send(message)

    return send_with_id


async def _answer(error: ApiError, body: bytes, send: Send, more: dict[str, str]) -> None:
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers,
        **more,
    }
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})
