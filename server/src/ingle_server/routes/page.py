"""``GET /``: a page to chat on, of files that come with this package."""

from __future__ import annotations

from importlib.resources import files

from litestar import Response, get
from litestar.params import FromPath

from ingle_server.errors import ApiError, shown

MEDIA_TYPES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "markdown.js": "text/javascript",
    "store.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""Every file there is; a name in a request is a key of this."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, nothing inline: text that slipped into the page could do no harm."""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@get("/", include_in_schema=False)
async def page() -> Response[bytes]:
    """The page."""
    return _file("index.html")


@get("/page/{name:str}", include_in_schema=False)
async def page_file(name: FromPath[str]) -> Response[bytes]:
    """One of its files."""
    if name not in MEDIA_TYPES:
        raise ApiError(404, f"The page has no file {shown(name)}.")
    return _file(name)


def _file(name: str) -> Response[bytes]:
    data = (files("ingle_server") / "page" / name).read_bytes()
    return Response(data, media_type=MEDIA_TYPES[name], headers=_HEADERS)
