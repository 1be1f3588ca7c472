"""The 35 bad inputs of specs/robustness.md §3, counted one by one against a real server process.

=====  ==============================================================================
rows   where
=====  ==============================================================================
1–28   ``test_a_bad_input_is_refused_as_wanted``, one case a row (data: ``bad_inputs``)
9      also ``test_row_09_nothing_is_fetched``
29     ``test_row_29_wrong_methods_and_unknown_paths``
30     ``test_row_30_keys``
31     ``test_a_bad_input_is_refused_as_wanted``
32     ``test_row_32_hostile_heads``, one case an input
33     ``test_a_bad_input_is_refused_as_wanted``
34     ``test_row_34_a_full_queue``
35     ``test_row_35_draining``; a dead engine is in tests/server/test_server_life_cycle.py
=====  ==============================================================================

Every refusal must have the status, ``param`` and ``code`` of the specification, all four keys, and
a message that names what was wrong and the value seen, shows nothing of the server's inside, and is
short.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bad_inputs import ROWS, Bad, C, P
from live_server import LiveServer, live_server

KEY = {"authorization": "Bearer secret"}
LEAKS = ("Traceback", "0x", ".py", "site-packages", "/work/", "/home/", "object at")
ANSWER_SECONDS = 10.0
"""Row 24's bound, held for every row."""


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a refusal, its shape checked."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) <= 500
    assert not [leak for leak in LEAKS if leak in error["message"]]
    return error


def check_refusal(server: LiveServer, bad: Bad) -> None:
    headers = dict(bad.headers)
    response = server.http.post(
        bad.path, content=bad.content, headers=headers, timeout=ANSWER_SECONDS
    )
    if bad.may_pass and response.status_code == 200:
        return
    error = error_of(response, bad.status)
    seen = (error["type"], error["param"], error["code"])
    assert seen == ("invalid_request_error", bad.param, bad.code), error
    for text in bad.says:
        assert text in error["message"], (text, error["message"])


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"row {row:02}: {name}" for row, (name, _) in ROWS.items()]
)
def test_a_bad_input_is_refused_as_wanted(demo_server: LiveServer, row: int) -> None:
    for bad in ROWS[row][1]:
        check_refusal(demo_server, bad)
    assert demo_server.http.get("/health").status_code == 200


def test_every_row_has_its_test() -> None:
    tested = set(ROWS) | {int(name[9:11]) for name in globals() if name.startswith("test_row_")}
    assert tested == set(range(1, 36))


def test_row_09_nothing_is_fetched(demo_server: LiveServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/cat.png"
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "demo", "messages": [{"role": "user", "content": parts}]}
        error = error_of(demo_server.http.post(C, json=body), 400)
        assert error["param"] == "messages[0].content[1].type"
        with pytest.raises(BlockingIOError):
            canary.accept()


def test_row_29_wrong_methods_and_unknown_paths(demo_server: LiveServer) -> None:
    for method, path, status in (
        ("GET", C, 405),
        ("GET", P, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/nope", 404),
        ("POST", "/v1/nope", 404),
    ):
        response = demo_server.http.request(method, path)
        error = error_of(response, status)
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            None,
        )
        assert path in error["message"]
        if status == 405:
            assert response.headers["allow"] in error["message"]
            assert method in error["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", id="lengths"),
        pytest.param(HEAD + b"Content-Length: -5\r\n\r\nhello", id="negative length"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n", id="chunk size"),
        pytest.param(HEAD + b"X-Big: " + b"a" * 2**23 + b"\r\n\r\n", id="8 MiB header"),
        pytest.param(HEAD + b"X-Many: a\r\n" * 200_000 + b"\r\n", id="200,000 headers"),
    ],
)
def test_row_32_hostile_heads(demo_server: LiveServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", demo_server.port), ANSWER_SECONDS) as connection:
        try:
            connection.sendall(data)
            answer = b""
            while piece := connection.recv(65536):  # until the server closes the connection
                answer += piece
        except (ConnectionResetError, BrokenPipeError):
            answer = b""  # closed while the head was still being sent
    assert not answer or answer.split(b" ")[1] in (b"400", b"431")
    assert demo_server.http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def narrow_server(
    demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A server with a key that runs one request and lets one more wait; the last test stops it."""
    flags = (
        "--enforce-eager",
        "--max-num-seqs",
        "1",
        "--max-queue-len",
        "1",
        "--api-key",
        "secret",
    )
    folder = tmp_path_factory.mktemp("narrow")
    more = ("--served-model-name", "demo", "--shutdown-timeout", "2")
    with live_server(folder, demo_model_dir, *flags, *more) as server:
        yield server


def test_row_30_keys(narrow_server: LiveServer) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic c2VjcmV0"},
        {"authorization": "secret"},
    ):
        for path in (P, "/tokenize"):
            response = narrow_server.http.post(path, json={"model": "demo"}, headers=headers)
            error = error_of(response, 401)
            assert (error["param"], error["code"]) == (None, "invalid_api_key")
            assert "secret" not in error["message"]
    answer = narrow_server.http.get("/v1/models", headers=KEY)
    assert answer.status_code == 200


ENDLESS = {"model": "demo", "prompt": "Once", "max_tokens": 8000, "ignore_eos": True}


def wait_for(http: httpx.Client, gauge: str, value: int) -> None:
    """Returns once a gauge shows ``value``."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while f"\ningle_{gauge} {value}" not in (text := http.get("/metrics").text):
        assert time.monotonic() < deadline, text


def test_row_34_a_full_queue(narrow_server: LiveServer) -> None:
    """One runs, one waits; of the others each is refused, streamed or not."""
    with httpx.Client(base_url=narrow_server.url, headers=KEY, timeout=60) as http:
        body = {**ENDLESS, "stream": True}
        with http.stream("POST", P, json=body):
            wait_for(http, "num_requests_running", 1)
            with http.stream("POST", P, json=body):
                wait_for(http, "num_requests_waiting", 1)
                for stream in (False, True):
                    response = http.post(P, json={**ENDLESS, "stream": stream})
                    error = error_of(response, 429)
                    assert int(response.headers["retry-after"]) >= 1
                    kind = (error["type"], error["param"], error["code"])
                    assert kind == ("rate_limit_error", None, "rate_limit_exceeded")
        wait_for(http, "num_requests_running", 0)
        wait_for(http, "num_requests_waiting", 0)


def test_row_35_draining(narrow_server: LiveServer) -> None:
    """SIGTERM during a stream: newcomers get 503, the stream an error event and its end."""
    http = narrow_server.http
    body = {**ENDLESS, "stream": True}
    with httpx.stream(
        "POST", narrow_server.url + P, json=body, headers=KEY, timeout=60
    ) as streaming:
        lines = streaming.iter_lines()
        assert next(lines).startswith("data: {")
        narrow_server.popen.send_signal(signal.SIGTERM)
        while http.get("/health").status_code == 200:
            pass
        response = http.post(P, json=ENDLESS, headers=KEY)
        error = error_of(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        assert (error["param"], error["code"]) == (None, None)
        *_, last, done = [line for line in lines if line.startswith("data: ")]
    assert json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert narrow_server.popen.wait(60) == 0


def test_after_all_that_the_server_is_well(demo_server: LiveServer) -> None:
    assert demo_server.http.get("/health").status_code == 200
    assert demo_server.is_idle()
    assert "Traceback" not in demo_server.log
