"""What happens to the engine of a real server process: death, a hang, exhausted memory, signals."""

from __future__ import annotations

import signal
import time
from typing import Any

import httpx
import pytest
from fault_clients import Client, check_told, completion, eventually
from live_server import LiveServer

pytestmark = pytest.mark.slow
EXIT_SECONDS = 30.0


def two_under_way(server: LiveServer) -> tuple[Client, Client]:
    """A streamed and a plain request that compute."""
    both = Client(server, stream=True), Client(server)
    eventually(both[0].has_begun)
    eventually(lambda: server.gauges()["ingle_num_requests_running"] == 2)
    return both


def watch_health(server: LiveServer) -> httpx.Response:
    """The first health that is not 200."""
    seen: list[httpx.Response] = []

    def is_ill() -> bool:
        seen.append(server.http.get("/health"))
        return seen[-1].status_code != 200

    eventually(is_ill)
    return seen[-1]


@pytest.mark.parametrize("deed", ["fail", "leave"])
def test_a_dead_engine_is_told_to_all_and_ends_the_process(faulty: Any, deed: str) -> None:
    """By an exception in a step, and by a thread that just ends."""
    running = faulty()
    both = two_under_way(running.server)
    running.order(deed)
    ill = watch_health(running.server)
    assert ill.status_code == 503
    assert "has stopped" in ill.json()["error"]["message"]
    check_told(*both, 500)
    assert running.server.popen.wait(EXIT_SECONDS) == 1
    assert "The engine has died; the server exits" in running.server.log


def test_new_requests_are_refused_once_the_engine_is_dead(faulty: Any) -> None:
    running = faulty()
    both = two_under_way(running.server)
    running.order("fail")
    watch_health(running.server)
    response = running.server.http.post("/v1/completions", json=completion())
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    check_told(*both, 500)


def test_a_step_that_hangs_is_noticed_told_and_ends_the_process(faulty: Any) -> None:
    running = faulty("--watchdog-seconds", "2")
    both = two_under_way(running.server)
    running.order("hang")
    ill = watch_health(running.server)
    assert ill.status_code == 503
    assert "has not returned for 2 s (--watchdog-seconds)" in ill.json()["error"]["message"]
    for message in check_told(*both, 500):
        assert "--watchdog-seconds" in message
    assert running.server.popen.wait(EXIT_SECONDS) == 1


def test_a_second_signal_stops_even_a_server_whose_step_hangs(faulty: Any) -> None:
    running = faulty("--shutdown-timeout", "600")
    both = two_under_way(running.server)
    running.order("hang")
    eventually(lambda: not running.is_waiting())
    began = time.monotonic()
    running.server.popen.send_signal(signal.SIGTERM)
    eventually(lambda: running.server.http.get("/health").status_code == 503)
    running.server.popen.send_signal(signal.SIGTERM)
    check_told(*both, 503)
    assert running.server.popen.wait(EXIT_SECONDS) == 0
    assert time.monotonic() - began < EXIT_SECONDS


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(faulty: Any) -> None:
    running = faulty("--shutdown-timeout", "120")
    fields: dict[str, Any] = {"max_tokens": 100, "logprobs": 0}
    streamed = Client(running.server, stream=True, **fields)
    plain = Client(running.server, **fields)
    eventually(lambda: running.server.gauges()["ingle_num_requests_running"] == 2)
    running.server.popen.send_signal(signal.SIGTERM)
    eventually(lambda: running.server.http.get("/health").status_code == 503)
    refused = running.server.http.post("/v1/completions", json=completion(max_tokens=1))
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert streamed.join().num_tokens() == 100
    assert plain.join().status == 200
    assert '"completion_tokens":100' in plain.text
    assert running.server.popen.wait(EXIT_SECONDS) == 0


def test_a_step_without_memory_ends_the_newest_request_only(faulty: Any) -> None:
    running = faulty()
    fields = {"stream": True, "logprobs": 0, "max_tokens": 120}
    old = [Client(running.server, **fields) for _ in range(2)]
    eventually(lambda: all(client.has_begun() for client in old))
    running.order("exhaust")
    newest = Client(running.server, **fields)
    last = newest.join().events()[-1]
    assert last["error"]["type"] == "server_error"
    for client in old:
        assert client.join().num_tokens() == 120
    assert running.server.http.get("/health").status_code == 200
    eventually(running.server.is_idle, 5)
    again = running.server.http.post("/v1/completions", json=completion(max_tokens=2))
    assert again.status_code == 200


def test_a_crash_of_the_whole_process_breaks_connections_instead_of_leaving_them_open(
    faulty: Any,
) -> None:
    running = faulty()
    both = two_under_way(running.server)
    running.order("segfault")
    assert running.server.popen.wait(EXIT_SECONDS) != 0
    for client in both:
        assert client.join().error is not None
