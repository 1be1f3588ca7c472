"""Hub ids, against a stub of the hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ingle import CheckpointError
from ingle.checkpoint.hub import resolve_model

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"raise SystemExit(13)",
    "onnx/model.onnx.json": b"{}",
    "consolidated.safetensors": b"again",
    "README.md": b"# tiny",
}
REPOSITORIES: dict[str, Any] = {
    "ingle/tiny": {"main": FILES, "other": {**FILES, "config.json": b'{"branch": true}'}},
    "ingle/pickles": {"main": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}},
    "ingle/gated": None,
}
SCRIPT = """
import json, sys
from ingle import CheckpointError
from ingle.checkpoint.hub import resolve_model
for model, revision in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"path": str(resolve_model(model, revision))}))
    except CheckpointError as error:
        print(json.dumps({"error": str(error)}))
"""


COMMIT = "a" * 40
BRANCH_COMMIT = "b" * 40


class HubStub(ThreadingHTTPServer):
    """Answers what ``snapshot_download`` asks; ``requests`` lists the paths asked for.

    Args:
        repositories: ``{id: {revision: {file name: content}}}``; None as an id's value makes it a
            gated repository.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, dict[str, bytes]] | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        """What to put into HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(stub: HubStub) -> Iterator[HubStub]:
    """Serves in a thread until the block ends."""
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubStub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        """Nothing: the test's output is its own."""

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4], parts[5])
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)

    def _files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision; None when the answer, an error, has been sent."""
        revisions = self.server.repositories.get(repository, {})
        if revisions is None:
            return self._fail(403, "GatedRepo")
        if not revisions:
            return self._fail(404, "RepoNotFound")
        named = {COMMIT: "main", BRANCH_COMMIT: "other"}.get(revision, revision)
        if named not in revisions:
            return self._fail(404, "RevisionNotFound")
        return revisions[named]

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _api(self, repository: str, what: str, revision: str) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        content: Any = {"id": repository, "sha": _commit(revision), "siblings": []}
        if what == "tree":
            content = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in files.items()
            ]
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"}, True)

    def _file(self, repository: str, revision: str, name: str, body: bool) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        data = files[name]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": _commit(revision)}
        self._send(data, headers, body)

    def _send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _commit(revision: str) -> str:
    return BRANCH_COMMIT if revision in ("other", BRANCH_COMMIT) else COMMIT


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def stub() -> Iterator[HubStub]:
    with serving(HubStub(REPOSITORIES)) as running:
        yield running


def resolve(cache: Path, endpoint: str, *asked: tuple[str, str | None], **env: str) -> list[Any]:
    """What a fresh process says: huggingface_hub reads its environment when it is imported."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(asked)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hub_ids_are_downloaded_and_errors_say_what_to_do(stub: HubStub, tmp_path: Path) -> None:
    answers = resolve(
        tmp_path,
        stub.url,
        ("ingle/tiny", None),
        ("ingle/tiny", "other"),
        ("ingle/tiny", "nowhere"),
        ("ingle/absent", None),
        ("ingle/gated", None),
        ("ingle/pickles", None),
    )
    main, other = Path(answers[0]["path"]), Path(answers[1]["path"])
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in main.iterdir()} == wanted
    assert (main / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((other / "config.json").read_text()) == {"branch": True}
    assert "no revision 'nowhere'" in answers[2]["error"]
    assert "no model of that name" in answers[3]["error"]
    assert "is gated: accept its terms" in answers[4]["error"]
    assert "has no .safetensors files on the hub" in answers[5]["error"]
    assert not any(request.endswith((".bin", ".py", ".onnx.json")) for request in stub.requests)


def test_what_is_cached_serves_offline_and_the_rest_is_refused(
    stub: HubStub, tmp_path: Path
) -> None:
    first = resolve(tmp_path, stub.url, ("ingle/tiny", None))
    asked = (("ingle/tiny", None), ("ingle/absent", None))
    offline = resolve(tmp_path, stub.url, *asked, HF_HUB_OFFLINE="1")
    assert offline[0] == first[0]
    assert "cannot be reached" in offline[1]["error"]
    unreachable = resolve(tmp_path, "http://127.0.0.1:9", *asked)
    assert unreachable[0] == first[0]
    assert "cannot be reached" in unreachable[1]["error"]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("~/models") == tmp_path / "models"


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "model", ["./nowhere", "/no/such/folder", "a/b/c", "", "a b", "../no/such"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match="is no hub id"):
        resolve_model(model)
