"""Streams on the wire, clients that leave, a full queue, a dead engine, a stop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from server_checks import check_error
from server_fake_engine import FakeEngine
from server_under_test import TIMEOUT, Running, running_server

from ingle import CapacityError, RequestError
from ingle_server import lifecycle
from ingle_server.flight import MAX_PIECES

CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def raw_post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def events(text: str) -> list[str]:
    """The data of every event; checks the framing."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def test_a_stream_is_framed_as_the_client_expects(http: httpx.Client) -> None:
    response = http.post(PATH, json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *frames, done = events(response.text)
    assert done == "[DONE]"
    for frame in map(json.loads, frames):
        (choice,) = frame["choices"]
        assert {"index", "delta", "logprobs", "finish_reason"} <= set(choice)
        assert "usage" not in frame
    first, last = json.loads(frames[0]), json.loads(frames[-1])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}


def test_usage_can_come_with_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    *frames, _ = map(json.loads, events(http.post(PATH, json=body).text)[:-1])
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_tokens_arrive_while_the_answer_is_still_being_made() -> None:
    with running_server(FakeEngine(hold=3)) as running, running.client() as client:
        with client.stream("POST", PATH, json={**CHAT, "stream": True}) as response:
            chunks = response.iter_raw()
            seen = b""
            while seen.count(b'"content":"') < 3:  # the role, Z, o
                seen += next(chunks)
            assert running.service.num_flights == 1
            assert client.get("/load").json() == {"server_load": 1}
            running.do(running.engine.release)
            assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
        eventually(lambda: running.service.num_flights == 0)


def test_silence_is_filled_with_comments() -> None:
    with (
        running_server(FakeEngine(hold=0), sse_keep_alive=0.05) as running,
        running.client() as client,
        client.stream("POST", PATH, json={**CHAT, "stream": True}) as response,
    ):
        chunks = response.iter_raw()
        seen = b""
        while seen.count(b": ping\n\n") < 2:
            seen += next(chunks)
        running.do(running.engine.release)
        assert b"[DONE]" in b"".join(chunks)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_its_request(stream: bool, n: int) -> None:
    engine = FakeEngine(hold=4)
    with running_server(engine) as running:
        with running.raw() as sock:
            sock.sendall(raw_post({**CHAT, "stream": stream, "n": n}))
            eventually(lambda: len(engine.active) == 1)
            assert running.service.num_flights == 1
        eventually(lambda: not engine.active and running.service.num_flights == 0)
        assert len(engine.aborted) == 1


def test_a_client_that_leaves_aborts_all_its_prompts() -> None:
    engine = FakeEngine(hold=4)
    with running_server(engine) as running, running.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/completions",
                json={"model": "fake/model", "prompt": ["a", "b", "c"]},
                timeout=0.3,
            )
        eventually(lambda: not engine.active)
        assert len(engine.aborted) == 3


def test_a_slow_reader_blocks_nobody_else() -> None:
    engine = FakeEngine()
    with running_server(engine) as running, running.client() as client, running.raw() as sock:
        # Some 5 MB of frames, more than the sockets hold, and nobody reads them.
        sock.sendall(raw_post({**CHAT, "stream": True, "n": 32, "ignore_eos": True}))
        eventually(lambda: bool(engine.seen))
        assert client.post(PATH, json=CHAT).status_code == 200
        (flight,) = running.service._shared.flights
        eventually(lambda: flight.num_pieces == MAX_PIECES)  # more is not fetched
        assert client.post(PATH, json=CHAT).status_code == 200
        assert flight.num_pieces == MAX_PIECES
        assert not engine.aborted
    assert len(engine.aborted) == 1


def test_a_reader_that_wakes_up_late_gets_everything() -> None:
    engine = FakeEngine()
    with running_server(engine) as running, running.client() as client:
        body = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 1000}
        with client.stream("POST", PATH, json=body) as response:
            # It may be over by now: a socket takes that much without a reader.
            eventually(lambda: bool(engine.seen))
            assert client.post(PATH, json=CHAT).status_code == 200
            text = b"".join(response.iter_raw()).decode()
        contents = [
            json.loads(event)["choices"][0]["delta"].get("content", "")
            for event in events(text)[:-1]
        ]
        assert "".join(contents) == "x" * 1000


def test_a_storm_of_aborts_leaves_nothing_behind() -> None:
    engine = FakeEngine(hold=2)
    with running_server(engine) as running:
        socks = [running.raw() for _ in range(64)]
        for i, sock in enumerate(socks):
            sock.sendall(raw_post({**CHAT, "stream": i % 2 == 0}))
        eventually(lambda: len(engine.active) == 64)
        for sock in socks:
            sock.close()
        eventually(lambda: not engine.active and running.service.num_open_requests == 0)
        running.do(engine.release)
        with running.client() as client:
            assert client.post(PATH, json=CHAT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_429_with_retry_after(stream: bool) -> None:
    engine = FakeEngine()
    engine.refusal = CapacityError("1024 requests are waiting")
    with running_server(engine) as running, running.client() as client:
        response = client.post(PATH, json={**CHAT, "stream": stream})
        error = check_error(response, 429, None, "rate_limit_exceeded")
        assert error["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_is_a_plain_400(stream: bool) -> None:
    engine = FakeEngine()
    engine.refusal = RequestError("No.", param="seed", code="odd")
    with running_server(engine) as running, running.client() as client:
        check_error(client.post(PATH, json={**CHAT, "stream": stream}), 400, "seed", "odd")


def test_one_failed_row_is_a_500_without_its_reason() -> None:
    engine = FakeEngine()
    engine.row_error = "NaN at 0x7f12345678 in /usr/lib/x.py"
    with running_server(engine) as running, running.client() as client:
        error = check_error(client.post(PATH, json=CHAT), 500, None)
        assert error["type"] == "server_error"
        *frames, bad, done = events(client.post(PATH, json={**CHAT, "stream": True}).text)
        assert done == "[DONE]"
        assert frames
        assert set(json.loads(bad)["error"]) == {"message", "type", "param", "code"}
        assert "0x" not in bad
        engine.row_error = None
        assert client.post(PATH, json=CHAT).status_code == 200


def test_an_unforeseen_fault_is_a_bare_500() -> None:
    engine = FakeEngine()
    engine.refusal = ZeroDivisionError("in /usr/lib/secret.py")
    with running_server(engine) as running, running.client() as client:
        assert "secret" not in check_error(client.post(PATH, json=CHAT), 500, None)["message"]


class Background:
    """A request in a thread of its own."""

    def __init__(self, running: Running, stream: bool) -> None:
        self.response: httpx.Response | None = None
        self._running = running
        self._stream = stream
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with self._running.client() as client:
            self.response = client.post(PATH, json={**CHAT, "stream": self._stream})

    def join(self) -> httpx.Response:
        self._thread.join(TIMEOUT)
        assert self.response is not None
        return self.response


def hold_two(running: Running) -> tuple[Background, Background]:
    """A streamed and a plain request, both under way."""
    both = Background(running, True), Background(running, False)
    eventually(lambda: len(running.engine.active) == 2)
    return both


def test_a_dead_engine_is_told_to_everybody_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "HEALTH_SECONDS", 0.2)
    engine = FakeEngine(hold=3)
    with running_server(engine) as running, running.client() as client:
        streamed, plain = hold_two(running)
        engine.dead = True
        check_error(client.get("/health"), 503, None)
        check_error(client.post(PATH, json=CHAT), 503, None)
        check_error(plain.join(), 500, None)
        *_, bad, done = events(streamed.join().text)
        assert (json.loads(bad)["error"]["type"], done) == ("server_error", "[DONE]")
        eventually(lambda: running.exit_codes == [1])


def test_a_step_that_does_not_return_ends_the_server_with_the_reason() -> None:
    engine = FakeEngine(hold=3)
    with running_server(engine, watchdog_seconds=0.2) as running, running.client() as client:
        streamed, plain = hold_two(running)
        assert client.get("/health").status_code == 200
        engine.stuck_seconds = 0.3
        error = check_error(client.get("/health"), 503, None)
        assert "has not returned for 0.2 s (--watchdog-seconds)" in error["message"]
        assert "--watchdog-seconds" in check_error(plain.join(), 500, None)["message"]
        *_, bad, done = events(streamed.join().text)
        assert "--watchdog-seconds" in json.loads(bad)["error"]["message"]
        assert done == "[DONE]"
        eventually(lambda: running.exit_codes == [1])


def test_the_watchdog_can_be_told_to_wait_for_ever() -> None:
    engine = FakeEngine()
    engine.stuck_seconds = 1e9
    with running_server(engine, watchdog_seconds=0.0) as running, running.client() as client:
        assert client.get("/health").status_code == 200


def test_a_stop_lets_running_requests_finish_and_refuses_new_ones() -> None:
    engine = FakeEngine(hold=3)
    with running_server(engine, shutdown_timeout=TIMEOUT) as running, running.client() as client:
        streamed, plain = hold_two(running)
        running.do(running.lifecycle.stop)
        eventually(lambda: running.service.draining)
        response = client.post(PATH, json=CHAT)
        check_error(response, 503, None)
        assert response.headers["retry-after"]
        check_error(client.get("/health"), 503, None)
        assert client.get("/metrics").status_code == 200
        running.do(engine.release)
        assert plain.join().status_code == 200
        assert events(streamed.join().text)[-2].count('"finish_reason":"stop"') == 1
        eventually(lambda: running.exit_codes == [0])


@pytest.mark.parametrize("seconds", [0.1, TIMEOUT])
def test_a_stop_that_takes_too_long_ends_requests_with_errors(seconds: float) -> None:
    """By time, or by a second signal."""
    engine = FakeEngine(hold=3)
    with running_server(engine, shutdown_timeout=seconds) as running:
        streamed, plain = hold_two(running)
        running.do(running.lifecycle.stop)
        if seconds == TIMEOUT:
            running.do(running.lifecycle.stop)
        check_error(plain.join(), 503, None)
        *_, bad, done = events(streamed.join().text)
        assert "error" in json.loads(bad)
        assert done == "[DONE]"
        eventually(lambda: running.exit_codes == [0])
        assert not engine.active
