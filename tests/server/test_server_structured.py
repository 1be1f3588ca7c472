"""Structured output: which grammar reaches the engine, and what is refused before it runs."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from server_checks import check_error
from server_under_test import Running

from ingle import GrammarSpec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SPEC = GrammarSpec("json", json.dumps(SCHEMA, separators=(",", ":")))
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, SPEC),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SPEC),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a","b"]')),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            GrammarSpec("grammar", 'root ::= "a"'),
        ),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json", '{"type":"object"}')),
        ({"guided_json": SCHEMA}, SPEC),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"guided_choice": ["a"]}, GrammarSpec("choice", '["a"]')),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec("grammar", 'start: "a"')),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json", '{"type":"object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA},
                }
            },
            SPEC,
        ),
        ({"response_format": {"type": "text"}}, None),
        ({}, None),
    ],
)
def test_a_grammar_reaches_the_engine(
    shared: Running, fields: dict[str, Any], spec: GrammarSpec | None
) -> None:
    body = {"model": "fake/model", "prompt": "hi", **fields}
    with shared.client() as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200
    assert shared.engine.seen[-1].params.structured == spec


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_response_schema_is_enforced_whether_strict_or_not(
    shared: Running, strict: bool | None
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": strict}}
    body = {"model": "fake/model", "messages": MESSAGES, "response_format": form}
    with shared.client() as client:
        assert client.post(CHAT, json=body).status_code == 200
    assert shared.engine.seen[-1].params.structured == SPEC


def test_two_grammars_are_refused(http: httpx.Client) -> None:
    body = {"model": "fake/model", "prompt": "hi", "guided_regex": "a", "guided_choice": ["a"]}
    check_error(http.post(COMPLETIONS, json=body), 400, "guided_choice")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(deep(400), id="deep"),
        pytest.param(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
            id="wide",
        ),
        pytest.param({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}, id="pattern"),
        pytest.param({"$ref": "#"}, id="cycle"),
        pytest.param({"$ref": "http://127.0.0.1:9/schema"}, id="remote"),
        pytest.param({"enum": ["x" * 300_000]}, id="long"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_costly_schemas_end_quickly_and_never_in_a_server_error(
    http: httpx.Client, schema: dict[str, Any], stream: bool
) -> None:
    started = time.perf_counter()
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"model": "fake/model", "messages": MESSAGES, "response_format": form, "stream": stream}
    response = http.post(CHAT, json=body)
    if response.status_code != 200:
        check_error(response, 400, "response_format")
    assert time.perf_counter() - started < 10
