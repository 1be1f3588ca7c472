"""What every error body must look like."""

from __future__ import annotations

import re
from typing import Any

import httpx

LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6,}|site-packages|/usr/|/home/|/work/|\.py\b")


def check_error(
    response: httpx.Response, status: int, param: str | None, code: str | None = None
) -> dict[str, Any]:
    """Holds the answer against OpenAI's error shape; gives the error object."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"]
    assert len(error["message"]) <= 500
    assert not LEAKS.search(error["message"]), error["message"]
    return dict(error)
