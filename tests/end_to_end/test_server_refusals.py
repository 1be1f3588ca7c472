"""The bad inputs of robustness §3 against a real server with the demo model."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from live_server import LiveServer

P, C = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
DEEP: dict[str, Any] = {}
for _ in range(400):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


# Number in §3, path, field named by the error, values of it that are wrong.
WRONG: list[tuple[int, str, str, list[Any]]] = [
    (7, C, "messages", [[], "hi"]),
    (10, P, "prompt", [[], [[]], [None], 5]),
    (11, P, "prompt", [[10**9], [-1], [49152]]),
    (12, P, "prompt", [[5] * 8192, "a " * 9000]),
    (13, P, "max_tokens", [8192, 10**12]),
    (14, P, "temperature", [-1, 3, "hot"]),
    (15, P, "top_p", [-0.1, 1.5]),
    (16, P, "n", [0, -1, 1.5, 10**6, 2**63]),
    (17, P, "max_tokens", [-1, 1.5, "ten"]),
    (17, C, "max_completion_tokens", [0]),
    (18, P, "stop", [5, [5], list("abcdef"), [""]]),
    (19, P, "logprobs", [-1, 10**6]),
    (19, C, "top_logprobs", [21, 3]),
    (20, P, "logit_bias", ["x", {"abc": 1}, {"999999999": 1}, {"1": "x"}, {"1": 101}]),
    (21, P, "seed", ["s", 2**64]),
    (22, P, "stream", ["yes"]),
    (22, P, "stream_options", [{"include_usage": True}]),
    (
        23,
        C,
        "response_format",
        ["json", {"type": "sound"}, {"type": "json_schema"}, schema({"type": "hiccup"})],
    ),
    (
        24,
        C,
        "response_format",
        [
            schema(DEEP),
            schema({"properties": {f"p{i}": {} for i in range(5000)}}),
            schema({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}),
        ],
    ),
    (25, C, "tools", ["x", [{}], [{"type": "function", "function": {"name": 5}}]]),
    (25, C, "tool_choice", [{"type": "function", "function": {"name": "f"}}, "required"]),
    (26, P, "presence_penalty", [3]),
    (26, P, "repetition_penalty", [0]),
    (26, P, "min_p", [2]),
    (26, P, "top_k", [-7]),
    (26, P, "min_tokens", [100]),
    (27, P, "stop_token_ids", [[49152], [-1]]),
    (27, P, "allowed_token_ids", [[49152], []]),
    (31, C, "chat_template", ["{% for i in range(10**9) %}{% endfor %}"]),
    (31, C, "chat_template_kwargs", [{"tokenize": True}]),
]
RAW = {
    "1 cut": b'{"model": "x", "prompt": "a',
    "2 empty": b"",
    "2 list": b"[]",
    "2 number": b"5",
    "2 null": b"null",
    "3 UTF-8": b'{"model":"demo","prompt":"\xff\xfe"}',
    "4 surrogate": b'{"model":"demo","prompt":"emoji \\ud83d"}',
    "5 deep": b"[" * 200_000,
    "14 NaN": b'{"model":"demo","prompt":"a","temperature":NaN}',
    "14 huge": b'{"model":"demo","prompt":"a","temperature":1e999}',
    "20 huge": b'{"model":"demo","prompt":"a","logit_bias":{"1":1e400}}',
}


def refused(server: LiveServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must be refused, its shape checked."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = server.http.post(path, content=content, headers=JSON)
    assert response.status_code == status, response.text[:300]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


NESTED_REPEATS = "((a{1,1000}){1,1000}){1,1000}"
"""A pattern of row 24, which allows an answer in good time: this one compiles, since a schema's
pattern may match anywhere. The row's other grammars are refused."""


def answered(server: LiveServer, path: str, body: Any) -> bool:
    """Whether a request that may be refused was answered instead."""
    return server.http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(("number", "path", "field", "values"), WRONG)
def test_wrong_values_are_refused_by_field(
    demo_server: LiveServer, number: int, path: str, field: str, values: list[Any]
) -> None:
    good: dict[str, Any] = {"model": "demo"}
    if path == P:
        good["prompt"] = "hi"
    else:
        good["messages"] = [{"role": "user", "content": "hi"}]
    for value in values:
        body = {**good, field: value}
        if NESTED_REPEATS in str(value) and answered(demo_server, path, {**body, "max_tokens": 4}):
            continue
        error = refused(demo_server, path, body)
        assert error["param"] == field, (number, value, error)
        if number in (12, 13):
            assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", RAW)
def test_bodies_that_are_no_requests_are_refused(demo_server: LiveServer, name: str) -> None:
    refused(demo_server, C if name.startswith("2") else P, RAW[name])


def test_messages_are_refused_by_place(demo_server: LiveServer) -> None:
    picture = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    for message, param in (
        ({"content": "a"}, "messages[0].role"),
        ({"role": 5, "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": picture}, "messages[0].content[1].type"),
    ):
        error = refused(demo_server, C, {"model": "demo", "messages": [message]})
        assert error["param"] == param


@pytest.mark.parametrize("name", ["no/such", "../../etc/passwd"])
def test_unknown_models_are_404(demo_server: LiveServer, name: str) -> None:
    error = refused(demo_server, P, {"model": name, "prompt": "a"}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_wrong_methods_and_paths_have_an_error_body(demo_server: LiveServer) -> None:
    for path, status in ((C, 405), ("/v1/nope", 404)):
        response = demo_server.http.get(path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_of_64_megabytes_is_refused(demo_server: LiveServer) -> None:
    body = b'{"model":"demo","prompt":"' + b"a" * 2**26 + b'"}'
    assert demo_server.http.post(P, content=body, headers=JSON).status_code in (400, 413)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -5\r\n",
        b"X-Big: " + b"a" * 2**23 + b"\r\n",
    ],
)
def test_hostile_heads_are_refused_and_the_connection_closed(
    demo_server: LiveServer, head: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", demo_server.port), 10) as connection:
        try:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + head)
            connection.sendall(b"\r\nhello")
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):
            return  # closed while it was still being sent
    assert answer.split(b" ")[1] in (b"400", b"431")


def test_after_all_that_the_server_is_well(demo_server: LiveServer) -> None:
    assert demo_server.http.get("/health").status_code == 200
    assert demo_server.is_idle()
    assert "Traceback" not in demo_server.log
