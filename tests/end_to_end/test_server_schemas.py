"""Twenty schemas on the demo model through a real server: each answer validates, or was cut.

The validator is the ``jsonschema`` package, which knows nothing of the grammar's compiler.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from answer_schemas import SCHEMAS
from live_server import LiveServer

ENOUGH = 240
"""Tokens within which every one of the schemas can be answered."""
PATIENCE = 240.0
"""Seconds; so long because all schemas are asked at once, and machines may be busy."""
SEEDS = [1, *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.long]) for seed in (2, 3, 4))]


def ask(server: LiveServer, schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Make up an example, as JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "example", "schema": schema, "strict": True},
        },
        "temperature": 1.0,
        **fields,
    }
    response = server.http.post("/v1/chat/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return dict(response.json())


def check_whitespace(text: str) -> None:
    """No run of white space but in strings."""
    bare = re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)
    assert not re.search(r"\s\s|[\n\t\r]", bare), text


def everywhere(server: LiveServer, **fields: Any) -> dict[str, dict[str, Any]]:
    """Answers to all schemas, asked at once."""
    with ThreadPoolExecutor(len(SCHEMAS)) as pool:
        answers = pool.map(lambda schema: ask(server, schema, **fields), SCHEMAS.values())
        return dict(zip(SCHEMAS, answers, strict=True))


def test_there_are_twenty_schemas_that_are_schemas() -> None:
    assert len(SCHEMAS) == 20
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_validate(demo_server: LiveServer, seed: int) -> None:
    for name, answer in everywhere(demo_server, seed=seed, max_tokens=ENOUGH).items():
        (choice,) = answer["choices"]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop", (name, text)
        jsonschema.validate(json.loads(text), SCHEMAS[name], cls=jsonschema.Draft202012Validator)
        check_whitespace(text)


def test_answers_that_are_cut_are_reported_as_length(demo_server: LiveServer) -> None:
    short = 3
    cut = 0
    for name, answer in everywhere(demo_server, seed=1, max_tokens=short).items():
        (choice,) = answer["choices"]
        text, used = choice["message"]["content"], answer["usage"]["completion_tokens"]
        check_whitespace(text)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(text), SCHEMAS[name])
        else:
            assert (choice["finish_reason"], used) == ("length", short)
            cut += 1
    assert cut >= 15
