"""Two real models on one server, swapped under load, and the memory that comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import LiveServer, live_server

ADMIN = {"x-admin-key": "adm"}
MIB = 2**20
MARGIN = 64 * MIB
"""What allocators may keep: the model alone is ten times as large."""


def resident_bytes(server: LiveServer) -> int:
    return int(server.gauges()["process_resident_memory_bytes"])


def ask(server: LiveServer, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": 6,
        "temperature": 0,
    }
    answer = server.http.post("/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["message"]["content"])


def unload(server: LiveServer) -> None:
    assert server.http.post("/v1/model/unload", headers=ADMIN).status_code == 200


@pytest.mark.slow
def test_ten_swaps_under_load_lose_no_request_and_give_memory_back(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / name).symlink_to(demo_model_dir)
    flags = ("--allow-inline-model-loading", "--admin-key", "adm", "--enforce-eager")
    sizes = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB")
    folders = ("--model-dir", tmp_path / "models")
    with live_server(tmp_path, *folders, *flags, *sizes) as server:
        answers = {ask(server, "one"), ask(server, "two")}
        assert len(answers) == 1
        loaded = resident_bytes(server)
        unload(server)
        empty = resident_bytes(server)
        assert loaded - empty > 4 * MARGIN
        names = ["one", "two"] * 5
        with ThreadPoolExecutor(6) as pool:
            for first, second in zip(names, names[1:] + names[:1], strict=True):
                answers |= set(pool.map(lambda name: ask(server, name), [first] * 3 + [second] * 3))
        assert len(answers) == 1
        assert server.log.count("is in memory") >= 10
        assert resident_bytes(server) < loaded + MARGIN
        unload(server)
        left = resident_bytes(server)
        print(
            f"MiB: {loaded / MIB:.0f} loaded, {empty / MIB:.0f} empty, {left / MIB:.0f} at the end"
        )
        assert left < empty + MARGIN
