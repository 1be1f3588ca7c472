"""Keys, the Host header, CORS, request ids."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from server_checks import check_error
from server_under_test import Running, running_server

from ingle import ConfigError
from ingle_server.config import ServerConfig
from ingle_server.gate import allowed_hosts

BODY = {"model": "fake/model", "prompt": "hi"}
GUARDED = ["/v1/models", "/metrics", "/v1/plugins", "/load", "/ping", "/nope", "/schema"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running_server(api_key=("sesame", "other-key")) as running:
        yield running


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Basic c2VzYW1l", "sesame", "Bearer", "Bearer sesame2", ""]
)
def test_a_missing_or_wrong_key_is_refused(guarded: Running, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    with guarded.client(headers=headers) as client:
        for response in (*map(client.get, GUARDED), client.post("/v1/completions", json=BODY)):
            check_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["Bearer sesame", "Bearer other-key", "bearer sesame"])
def test_every_configured_key_opens(guarded: Running, header: str) -> None:
    with guarded.client(headers={"authorization": header}) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_health_and_version_need_no_key(guarded: Running) -> None:
    with guarded.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/version").status_code == 200


def test_any_key_is_accepted_when_none_is_configured(http: httpx.Client) -> None:
    headers = {"authorization": "Bearer whatever"}
    assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:2242", "localhost.evil.example"])
def test_a_foreign_host_name_is_refused_on_loopback(http: httpx.Client, host: str) -> None:
    check_error(http.get("/v1/models", headers={"host": host}), 403, None)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:99", "[::1]:5", "LOCALHOST"]
)
def test_names_of_this_machine_are_served(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_every_host_name_is_served_on_an_open_address() -> None:
    assert allowed_hosts(ServerConfig(host="0.0.0.0")) is None
    assert "127.0.0.2" in (allowed_hosts(ServerConfig(host="127.0.0.2")) or ())


def test_there_are_no_cors_headers_unless_configured(http: httpx.Client) -> None:
    response = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_configured_origins_may_call_but_never_with_credentials() -> None:
    origin = "https://app.example"
    with (
        running_server(allowed_origins=(origin,), api_key=("k",)) as running,
        running.client() as client,
    ):
        ask = {"origin": origin, "access-control-request-method": "POST"}
        preflight = client.options("/v1/completions", headers=ask)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in preflight.headers
        other = client.options("/v1/completions", headers=ask | {"origin": "https://evil"})
        assert "access-control-allow-origin" not in other.headers


def test_every_answer_has_a_request_id(http: httpx.Client) -> None:
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    answer = http.get("/v1/nope", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    bad = http.get("/health", headers={"x-request-id": "no spaces, please"})
    assert bad.headers["x-request-id"] != "no spaces, please"


def test_an_open_address_without_a_key_can_be_forbidden() -> None:
    with pytest.raises(ConfigError, match="--require-key"):
        ServerConfig(host="0.0.0.0", require_key=True)
    ServerConfig(host="0.0.0.0", require_key=True, api_key=("k",))
    ServerConfig(host="127.0.0.1", require_key=True)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"port": 70000}, "--port"),
        ({"api_key": ("",)}, "--api-key"),
        ({"api_key": ("two words",)}, "--api-key"),
        ({"root_path": "x"}, "--root-path"),
        ({"max_request_body": "lots"}, "--max-request-body"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout"),
        ({"sse_keep_alive": 0.0}, "--sse-keep-alive"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"max_prompts": 0}, "--max-prompts"),
    ],
)
def test_options_that_cannot_work_are_refused_by_their_flag(
    options: dict[str, object], flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        ServerConfig(**options)  # type: ignore[arg-type]
