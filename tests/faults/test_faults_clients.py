"""Clients that flood, stall, lie and leave, against a real server process."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from fault_clients import PATH, PATIENCE, Client, completion, eventually
from live_server import LiveServer

pytestmark = pytest.mark.slow
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def connection(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def request(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def check_well(server: LiveServer) -> None:
    """It answers, and holds nothing back."""
    response = server.http.post(PATH, json=completion(max_tokens=1))
    assert response.status_code == 200
    eventually(server.is_idle, 5)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_429_and_empties_when_clients_leave(
    sturdy_server: LiveServer, stream: bool
) -> None:
    body = request(json.dumps(completion(stream=stream)).encode())
    with ExitStack() as stack:
        for state in ("running", "waiting"):
            for _ in range(4):
                stack.enter_context(connection(sturdy_server)).sendall(body)
            eventually(lambda s=state: sturdy_server.gauges()[f"ingle_num_requests_{s}"] == 4)
        response = sturdy_server.http.post(PATH, json=completion(stream=stream))
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert sturdy_server.http.get("/health").status_code == 200
    eventually(sturdy_server.is_idle, 5)
    check_well(sturdy_server)


def test_a_reader_that_stops_reading_holds_up_nobody(sturdy_server: LiveServer) -> None:
    body = request(json.dumps(completion(stream=True, max_tokens=1000, n=2)).encode())
    with connection(sturdy_server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(body)
        eventually(lambda: sturdy_server.gauges()["ingle_num_requests_running"] == 2)
        quick = Client(sturdy_server, max_tokens=8).join()
        assert quick.status == 200
    eventually(sturdy_server.is_idle, 5)  # it has left in the middle
    check_well(sturdy_server)


HOSTILE_HEADS = {
    "a header of 8 MiB": b"X-Big: " + b"a" * 2**23 + b"\r\n\r\n",
    "200,000 headers": b"X-A: b\r\n" * 200_000 + b"\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a negative length": b"Content-Length: -5\r\n\r\nhello",
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no size": b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    "a header without end": b"X-Half: a\r\n b\r\nX\0Y: 1\r\n\r\n",
    "another host": b"Host: evil.example\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTILE_HEADS)
def test_hostile_heads_are_refused(sturdy_server: LiveServer, name: str) -> None:
    with connection(sturdy_server) as sock:
        try:
            sock.sendall(HEAD + HOSTILE_HEADS[name])
            answer = read_all(sock)
        except (ConnectionResetError, BrokenPipeError):
            answer = b""  # closed while it was still being sent
    assert not answer or answer.split(b" ")[1] in (b"400", b"403", b"413", b"431"), answer[:200]
    check_well(sturdy_server)


def test_a_page_that_rebinds_its_name_is_refused(sturdy_server: LiveServer) -> None:
    for host in ("evil.example", f"evil.example:{sturdy_server.port}", "127.0.0.1.evil.example"):
        response = sturdy_server.http.get("/v1/models", headers={"host": host})
        assert response.status_code == 403
        assert "evil.example" in response.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_huge_body_is_refused_without_being_kept(
    sturdy_server: LiveServer, chunked: bool
) -> None:
    before = resident_bytes(sturdy_server)
    size = 64 * 2**20

    def pieces() -> Iterator[bytes]:
        for _ in range(size // 2**20):
            yield b"a" * 2**20

    with connection(sturdy_server) as sock:
        try:
            if not chunked:
                sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
            else:
                sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for piece in pieces():
                sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it need not wait for the rest
        answer = read_all(sock)  # nothing, where the connection was reset while we still sent
    assert not answer or answer.split(b" ")[1] in (b"408", b"413"), answer[:200]
    assert resident_bytes(sturdy_server) - before < 48 * 2**20
    check_well(sturdy_server)


def resident_bytes(server: LiveServer) -> int:
    """Anonymous resident memory of the server's process."""
    with open(f"/proc/{server.popen.pid}/status") as status:
        (line,) = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


SLOW = {
    "no request": b"",
    "half a head": HEAD[:40],
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n" + b"{",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
}


@pytest.mark.parametrize("name", SLOW)
def test_half_a_request_is_given_up_after_a_while(sturdy_server: LiveServer, name: str) -> None:
    """``--header-timeout 2``; the answer, if any, says so."""
    with connection(sturdy_server) as sock:
        sock.sendall(SLOW[name])
        answer = read_all(sock)
    assert not answer or b" 408 " in answer[:20], answer[:200]
    check_well(sturdy_server)


def test_a_body_that_drips_is_given_up_though_it_never_stops(sturdy_server: LiveServer) -> None:
    began = time.monotonic()
    with connection(sturdy_server) as sock:
        sock.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        sock.settimeout(0.2)
        answer = b""
        while time.monotonic() - began < PATIENCE:
            try:
                sock.sendall(b" ")
                piece = sock.recv(65536)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                break
            if not piece:
                break
            answer += piece
    assert time.monotonic() - began < PATIENCE
    assert not answer or b" 408 " in answer[:20], answer[:200]
    check_well(sturdy_server)


def test_idle_connections_starve_nobody(sturdy_server: LiveServer) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connection(sturdy_server))
        check_well(sturdy_server)


@pytest.mark.parametrize("size", [0, 1, 60, 150])
def test_a_client_that_leaves_in_the_middle_of_its_request_leaves_nothing(
    sturdy_server: LiveServer, size: int
) -> None:
    whole = request(json.dumps(completion()).encode())
    for _ in range(20):
        with connection(sturdy_server) as sock:
            sock.sendall(whole[: size or None])
    eventually(sturdy_server.is_idle, 5)
    check_well(sturdy_server)


def test_requests_on_one_connection_are_answered_in_order(sturdy_server: LiveServer) -> None:
    one = request(json.dumps(completion(max_tokens=1)).encode())
    bad = request(b"{")
    with connection(sturdy_server) as sock:
        sock.sendall(one + bad + one)
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    codes = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert codes in ([b"200", b"400", b"200"], [b"200"], [])
    check_well(sturdy_server)
