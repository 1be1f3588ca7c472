"""TLS, CORS, path prefix and keys of ``ingle serve``, each with a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError, OpenAI

PROGRAM = Path(__file__).parent / "server_process.py"
TIMEOUT = 30.0
BODY = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
ORIGIN = "https://app.example"


@contextmanager
def serving(*flags: str, **variables: str) -> Iterator[str]:
    """The address of a server with these flags and environment variables."""
    command = [sys.executable, str(PROGRAM), "0", "--port", "0", *flags]
    environment = {**os.environ, **variables}
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert popen.stderr is not None
    try:
        lines = []
        for line in popen.stderr:
            lines.append(line)
            if line.startswith("Try:"):
                break
        found = re.search(r"Ready: (http\S+)/v1", "".join(lines))
        assert found, "".join(lines)
        yield found[1]
    finally:
        popen.kill()
        popen.wait(TIMEOUT)
        popen.stderr.close()


def refused(*flags: str) -> str:
    """What a server that does not start says; it must not have begun to load."""
    command = [sys.executable, str(PROGRAM), "0", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode in (1, 2)
    assert "loading" not in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    openssl = shutil.which("openssl")
    assert openssl, "this test makes its certificate with openssl"
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_tls_serves_every_client_that_trusts_the_certificate(
    certificate: tuple[Path, Path],
) -> None:
    cert, key = certificate
    with serving("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as url:
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=trust, timeout=TIMEOUT) as http:
            assert http.get("/health").status_code == 200
            streamed = http.post(CHAT, json={**BODY, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health", timeout=TIMEOUT)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health", timeout=TIMEOUT)


@pytest.mark.slow
def test_files_that_are_no_certificate_are_told_before_the_model_is_loaded(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    assert "--ssl-keyfile and --ssl-certfile must be given together" in refused(
        "--ssl-certfile", str(cert)
    )
    gone = refused("--ssl-certfile", "/no/such.pem", "--ssl-keyfile", str(key))
    assert "--ssl-certfile: /no/such.pem is no file" in gone
    assert "do not serve" in refused("--ssl-certfile", str(wrong), "--ssl-keyfile", str(key))
    assert "do not serve" in refused("--ssl-certfile", str(cert), "--ssl-keyfile", str(wrong))


def test_browsers_of_the_allowed_origins_may_call() -> None:
    origins = ["--allowed-origins", ORIGIN, "--allowed-origins", "http://localhost:3000"]
    with serving(*origins, "--api-key", "k") as url, httpx.Client(base_url=url) as http:
        ask = {
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = http.options(CHAT, headers=ask)
        assert preflight.status_code in (200, 204)
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in preflight.headers["access-control-allow-methods"]
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert {"authorization", "content-type"} <= {name.strip() for name in allowed.split(",")}
        call = {"origin": ORIGIN, "authorization": "Bearer k"}
        answer = http.post(CHAT, json=BODY, headers=call)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-credentials" not in answer.headers
        refused = http.post(CHAT, json=BODY, headers={"origin": ORIGIN})
        assert refused.status_code == 401  # and a page may read why
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        foreign = http.post(CHAT, json=BODY, headers={**call, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers


def test_a_proxy_may_publish_it_under_a_prefix() -> None:
    with serving("--root-path", "/llm", "--api-key", "k") as url:
        assert url.endswith("/llm")
        client = OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        assert client.models.list().data[0].id == "fake/model"
        assert client.chat.completions.create(**BODY).choices[0].message.content  # type: ignore[call-overload]
        bare = url.removesuffix("/llm")  # a proxy that cuts the prefix off
        key = {"authorization": "Bearer k"}
        assert httpx.get(f"{bare}/v1/models", headers=key).status_code == 200
        assert httpx.get(f"{bare}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models").status_code == 401
        missing = httpx.get(f"{url}/v1/nope", headers=key)
        assert (missing.status_code, set(missing.json())) == (404, {"error"})
        assert httpx.post(f"{url}/api/generate", headers=key, json={}).json().keys() == {"error"}
    assert "--root-path" in refused("--root-path", "llm/")


@pytest.mark.parametrize(
    "way",
    ["environment", *(pytest.param(way, marks=pytest.mark.slow) for way in ("flags", "file"))],
)
def test_keys_come_by_flag_by_environment_and_by_file(way: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("api-key: [one, two]\n")
    flags = {
        "flags": ["--api-key", "one", "--api-key", "two"],
        "environment": [],
        "file": ["--config", str(settings)],
    }[way]
    variables = {"INGLE_API_KEY": "one two"} if way == "environment" else {}
    with serving(*flags, **variables) as url:
        for key in ("one", "two"):
            client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            assert client.models.list().data
        with pytest.raises(AuthenticationError) as caught:
            OpenAI(base_url=f"{url}/v1", api_key="three", max_retries=0).models.list()
        assert caught.value.code == "invalid_api_key"
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": "two"}).status_code == 200
    assert "--api-key" in refused("--api-key", "with space")
