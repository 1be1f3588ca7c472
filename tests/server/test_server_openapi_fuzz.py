"""Schemathesis sends what the document allows and what it does not: no answer is a 5xx, and each
has a status, a media type and a body that the document knows."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_fake_engine import FakeEngine
from server_under_test import Running

from ingle_server.app import create_app

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


async def served_document() -> Any:
    """The document: pytest wants one test per operation before any fixture runs."""
    transport = httpx.ASGITransport(create_app(FakeEngine()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return (await client.get("/openapi.json")).json()


document = schemathesis.openapi.from_dict(asyncio.run(served_document()))
schema = document.exclude(path_regex="^/api/latest/")  # the same handlers as /api/v1/
USER = {"role": "user", "content": "hi"}


def within_reach(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with the model that is served, something to answer and numbers from 0 to 2: few of
    the bodies that a schema allows have all that, and the rest is refused at the door."""
    tamed = {name: _small(value) for name, value in body.items()} | {"model": "fake/model"}
    tamed.setdefault("max_tokens", 8)
    if "prompt" in tamed:
        tamed["prompt"] = str(tamed["prompt"] or "hi")
    if isinstance(messages := tamed.get("messages"), list):
        tamed["messages"] = [_message(each) for each in messages] or [USER]
    return tamed


def _small(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value % 2


def _message(message: Any) -> Any:
    return message | USER if isinstance(message, dict) and len(message) % 2 else message


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_a_5xx_or_an_answer_that_the_document_does_not_know(
    case: Any, shared: Running
) -> None:
    case.call_and_validate(base_url=shared.url, checks=CHECKS)
    if isinstance(case.body, dict):
        case.body = within_reach(case.body)
        case.call_and_validate(base_url=shared.url, checks=CHECKS)
