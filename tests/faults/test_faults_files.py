"""What happens to files while a server runs, and disks that are full when it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fault_clients import PATH, completion
from live_server import LiveServer, environment, live_server, run

pytestmark = pytest.mark.slow
FULL_DISK = Path(__file__).parent / "full_disk.py"


def answer(server: LiveServer) -> str:
    response = server.http.post(PATH, json={**completion(max_tokens=8), "model": "demo"})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.fixture
def copied(demo_model_dir: Path, tmp_path: Path) -> Iterator[tuple[LiveServer, Path]]:
    """A server whose model's files are the test's own, and the weights' file."""
    folder = shutil.copytree(demo_model_dir, tmp_path / "model")
    flags = ("--enforce-eager", "--served-model-name", "demo", "--max-model-len", "512")
    # Without it every answer is computed the same way, to the bit.
    plain = "--no-enable-prefix-caching"
    with live_server(tmp_path, folder, *flags, plain) as server:
        yield server, next(folder.glob("*.safetensors"))


def test_a_model_file_cut_short_or_replaced_while_serving_changes_nothing(
    copied: tuple[LiveServer, Path],
) -> None:
    """Nothing is read from the file after loading: a mapped page would be a SIGBUS."""
    server, weights = copied
    before = answer(server)
    size = weights.stat().st_size
    os.truncate(weights, 1000)
    assert answer(server) == before
    other = weights.with_name("other")
    other.write_bytes(b"\0" * size)
    os.replace(other, weights)
    assert answer(server) == before
    shutil.rmtree(weights.parent)
    assert answer(server) == before
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("flags", [(), ("--kv-cache-dtype", "fp8")])
def test_a_full_disk_costs_caches_and_nothing_else(
    demo_model_dir: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """No file can grow: the results of self-checks and of the cache's check stay unwritten."""
    env = environment(tmp_path / "site", XDG_CACHE_HOME=str(tmp_path / "cache"))
    words = ("--served-model-name", "demo", "--max-model-len", "512", *flags)
    program = (FULL_DISK,)
    with live_server(tmp_path, demo_model_dir, *words, env=env, program=program) as server:
        assert answer(server)
        assert server.http.get("/health").status_code == 200
        assert "Traceback" not in server.log
    assert not any(f.stat().st_size for f in (tmp_path / "cache").rglob("*") if f.is_file())


def test_a_cache_folder_that_cannot_be_made_costs_nothing_either(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    env = environment(tmp_path / "site", XDG_CACHE_HOME=str(tmp_path / "file"))
    words = ("--served-model-name", "demo", "--max-model-len", "512", "--kv-cache-dtype", "fp8")
    with live_server(tmp_path, demo_model_dir, *words, env=env) as server:
        assert answer(server)
        assert "Traceback" not in server.log


def test_a_full_disk_is_one_clear_line_where_a_file_was_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "model"
    line = [sys.executable, "-P", str(FULL_DISK), "demo-model", str(target)]
    env = environment(tmp_path / "site")
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (complaint,) = done.stderr.strip().splitlines()
    assert complaint.startswith("ingle: ")
    assert "File too large" in complaint
    assert not target.exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".model-")] == []


def test_two_servers_cannot_listen_on_one_port(copied: tuple[LiveServer, Path]) -> None:
    server, weights = copied
    folder = weights.parent.parent / "second"
    done = run(folder, ["serve", weights.parent, "--port", str(server.port)])
    assert done.returncode == 1
    assert "is in use" in done.stderr
    assert httpx.get(f"{server.url}/health").status_code == 200
