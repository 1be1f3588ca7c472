"""Loading, swapping and unloading models, with engines that only say who they are."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_checks import check_error
from server_fake_engine import FakeEngine
from server_under_test import TIMEOUT, Running, running_server

from ingle import ConfigError, EngineConfig
from ingle_server.config import ServerConfig
from ingle_server.model_entry import ModelEntry, find_models
from ingle_server.model_manager import LoadedModel, ModelManager

ADMIN = {"x-admin-key": "secret"}


class Shelf:
    """Models that can be loaded, and what became of them."""

    def __init__(self, *names: str) -> None:
        self.entries = [ModelEntry(names=(n,), config=EngineConfig(model=n)) for n in names]
        self.loads: list[str] = []
        self.engines: weakref.WeakSet[FakeEngine] = weakref.WeakSet()
        self.broken: set[str] = set()

    def load(
        self, config: EngineConfig, on_progress: Callable[[int, int], None] | None = None
    ) -> FakeEngine:
        self.loads.append(config.model)
        for done in (0, 50, 100) if on_progress is not None else ():
            on_progress(done, 100)  # type: ignore[misc]
        if config.model in self.broken:
            raise RuntimeError(f"{config.model} is broken at /home/somebody")
        engine = FakeEngine(name=config.model)
        engine.answer = f"I am {config.model}."
        self.engines.add(engine)
        return engine

    @property
    def num_alive(self) -> int:
        gc.collect()
        return len(self.engines)


@contextmanager
def serving(shelf: Shelf, **options: Any) -> Iterator[tuple[Running, httpx.Client]]:
    config = ServerConfig(**options)
    entry = shelf.entries[0]
    first = LoadedModel(entry, shelf.load(entry.config), config)
    manager = ModelManager(shelf.entries, shelf.load, config, first)
    del first
    with running_server(engine=manager, **options) as running, running.client() as http:
        yield running, http


def ask(http: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "who?"}]
    body = {"model": model, "messages": messages, **fields}
    return http.post("/v1/chat/completions", json=body)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_naming_another_model_swaps_to_it() -> None:
    shelf = Shelf("a", "b")
    with serving(shelf, allow_inline_model_loading=True) as (running, http):
        assert text(ask(http, "a")) == "I am a."
        assert text(ask(http, "b")) == "I am b."
        assert shelf.loads == ["a", "b"]
        assert running.service.names == ("b",)
        assert shelf.num_alive == 1


def test_a_hundred_requests_in_turns_are_all_answered_by_the_model_they_name() -> None:
    shelf = Shelf("a", "b")
    with serving(shelf, allow_inline_model_loading=True) as (_, http):
        names = ["a", "b"] * 50

        def one(name: str) -> str:
            if name == "b":
                return text(ask(http, name))
            lines = ask(http, name, stream=True).text.split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(one, names))
        assert answers == [f"I am {name}." for name in names]
        assert shelf.num_alive == 1


def test_a_running_request_ends_before_the_swap_and_later_ones_queue_behind() -> None:
    shelf = Shelf("a", "b")
    with serving(shelf, allow_inline_model_loading=True) as (running, http):
        current = running.service.models.current
        assert current is not None
        engine = current.engine
        engine.hold = 3  # type: ignore[attr-defined]
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(ask, http, "a")
            wait_until(lambda: bool(engine.active))  # type: ignore[attr-defined]
            second = pool.submit(ask, http, "b")
            wait_until(lambda: running.service.models.num_waiting == 1)
            third = pool.submit(ask, http, "a")
            wait_until(lambda: running.service.models.num_waiting == 2)
            assert shelf.loads == ["a"]
            running.do(engine.release)  # type: ignore[attr-defined]
            answers = [text(future.result(TIMEOUT)) for future in (first, second, third)]
        assert answers == ["I am a.", "I am b.", "I am a."]
        assert shelf.loads == ["a", "b", "a"]


def test_without_the_flag_another_model_is_a_404_that_says_what_to_do() -> None:
    with serving(Shelf("a", "b")) as (_, http):
        error = check_error(ask(http, "b"), 404, "model", "model_not_found")
        assert "--allow-inline-model-loading" in error["message"]
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "b"]
        assert http.get("/v1/models/b").json()["loaded"] is False
        assert http.get("/v1/models/a").json()["loaded"] is True


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc", "c", ""])
def test_names_are_keys_and_never_paths(name: str) -> None:
    shelf = Shelf("a", "b")
    options: dict[str, Any] = {"allow_inline_model_loading": True, "admin_key": ("secret",)}
    with serving(shelf, **options) as (_, http):
        check_error(ask(http, name), 404, "model", "model_not_found")
        answer = http.post("/v1/model/load", json={"model": name}, headers=ADMIN)
        assert answer.status_code == (404 if name else 400)
        assert shelf.loads == ["a"]


def test_a_model_that_cannot_be_loaded_fails_its_requests_only() -> None:
    shelf = Shelf("a", "b")
    shelf.broken.add("b")
    with serving(shelf, allow_inline_model_loading=True) as (_, http):
        check_error(ask(http, "b"), 500, None)
        assert text(ask(http, "a")) == "I am a."
        assert shelf.loads == ["a", "b", "a"]


def test_admin_routes_are_closed_by_default() -> None:
    with serving(Shelf("a")) as (_, http):
        for method, path in (
            ("POST", "/v1/model/load"),
            ("POST", "/v1/model/unload"),
            ("DELETE", "/v1/model/unload"),
        ):
            answer = http.request(method, path, json={"model": "a"})
            check_error(answer, 403, None, "admin_key_required")


def test_the_admin_key_is_needed_and_the_api_key_is_not_enough() -> None:
    shelf = Shelf("a", "b")
    with serving(shelf, admin_key=("secret",), api_key=("user",)) as (_, http):
        for headers in ({}, {"authorization": "Bearer user"}, {"x-admin-key": "wrong"}):
            answer = http.post("/v1/model/load", json={"model": "b"}, headers=headers)
            check_error(answer, 401, None, "invalid_api_key")
        for headers in (ADMIN, {"authorization": "Bearer secret"}):
            answer = http.post("/v1/model/unload", headers=headers)
            assert answer.status_code == 200
        assert http.get("/v1/models", headers=ADMIN).status_code == 200
        assert http.get("/v1/models", headers={"x-admin-key": "wrong"}).status_code == 401


def test_loading_streams_its_progress() -> None:
    shelf = Shelf("a", "b")
    with serving(shelf, admin_key=("secret",)) as (_, http):
        answer = http.post("/v1/model/load", json={"model_name": "b"}, headers=ADMIN)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        steps = [json.loads(event) for event in events]
        assert [step["module"] for step in steps] == [0, 50, 99, 100]
        assert steps[1]["bytes_read"] == 50
        assert [step["status"] for step in steps][-1] == "finished"
        assert text(ask(http, "b")) == "I am b."
        assert shelf.num_alive == 1


def test_loading_can_answer_once_and_reports_failure() -> None:
    shelf = Shelf("a", "b", "c")
    shelf.broken.add("c")
    with serving(shelf, admin_key=("secret",)) as (_, http):
        body = {"model": "b", "stream": False}
        answer = http.post("/v1/model/load", json=body, headers=ADMIN)
        assert answer.json()["status"] == "finished"
        body = {"model": "c", "stream": False}
        check_error(http.post("/v1/model/load", json=body, headers=ADMIN), 500, None)
        streamed = http.post("/v1/model/load", json={"model": "c"}, headers=ADMIN).text
        assert '"error"' in streamed
        assert "somebody" not in streamed


def test_an_unloaded_model_answers_503_until_it_is_loaded_again() -> None:
    shelf = Shelf("a")
    with serving(shelf, admin_key=("secret",)) as (_, http):
        answer = http.delete("/v1/model/unload", headers=ADMIN)
        assert answer.json() == {"model": "a", "status": "unloaded"}
        assert shelf.num_alive == 0
        check_error(ask(http, "a"), 503, None, "model_not_loaded")
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models/a").json()["max_model_len"] == 1024
        assert "ingle_model_loaded 0.0" in http.get("/metrics").text
        http.post("/v1/model/load", json={"model": "a"}, headers=ADMIN)
        assert text(ask(http, "a")) == "I am a."


def test_an_idle_model_leaves_memory_and_the_next_request_wakes_it() -> None:
    shelf = Shelf("a", "b")
    with serving(shelf, idle_unload=0.05) as (running, http):
        assert text(ask(http, "a")) == "I am a."
        wait_until(lambda: running.service.models.current is None)
        wait_until(lambda: not running.service.models.is_switching)
        assert shelf.num_alive == 0
        assert text(ask(http, "a")) == "I am a."
        assert shelf.loads == ["a", "a"]


def test_a_request_that_runs_longer_than_the_idle_time_keeps_its_model() -> None:
    shelf = Shelf("a")
    with serving(shelf, idle_unload=0.05) as (running, http), ThreadPoolExecutor(1) as pool:
        engine = next(iter(shelf.engines))
        engine.hold = 3
        answer = pool.submit(ask, http, "a")
        wait_until(lambda: bool(engine.active))
        threading.Event().wait(0.15)
        assert running.service.models.current is not None
        running.do(engine.release)
        assert text(answer.result(TIMEOUT)) == "I am a."
        wait_until(lambda: running.service.models.current is None)


def test_stopping_ends_those_who_wait_for_a_model() -> None:
    shelf = Shelf("a", "b")
    options: dict[str, Any] = {"allow_inline_model_loading": True, "shutdown_timeout": 0.1}
    with serving(shelf, **options) as (running, http), ThreadPoolExecutor(2) as pool:
        engine = next(iter(shelf.engines))
        engine.hold = 3
        running_one = pool.submit(ask, http, "a")
        wait_until(lambda: bool(engine.active))
        waiting_one = pool.submit(ask, http, "b")
        wait_until(lambda: running.service.models.num_waiting == 1)
        running.do(running.lifecycle.stop)
        assert waiting_one.result(TIMEOUT).status_code == 503
        assert running_one.result(TIMEOUT).status_code == 503
        assert shelf.loads == ["a"]


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_of_models_is_listed_by_their_folders_names(tmp_path: Path) -> None:
    for name in ("zebra", "ant"):
        make_model(tmp_path / name)
    (tmp_path / "empty").mkdir()
    entries = find_models(EngineConfig(), ServerConfig(model_dir=str(tmp_path)))
    assert [entry.names for entry in entries] == [("ant",), ("zebra",)]
    assert entries[0].config.model == str(tmp_path / "ant")
    first = find_models(EngineConfig(model="x/y"), ServerConfig(model_dir=str(tmp_path)))
    assert [entry.name for entry in first] == ["x/y", "ant", "zebra"]


def test_models_with_the_same_name_are_refused(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "1" / "m"), make_model(tmp_path / "2" / "m")
    engine = EngineConfig(model=str(one))
    with pytest.raises(ConfigError, match="--served-model-name"):
        find_models(engine, ServerConfig(more_models=(str(two),)))
    names = ("first", "second")
    server = ServerConfig(more_models=(str(two),), served_model_name=names)
    assert [entry.name for entry in find_models(engine, server)] == ["first", "second"]
    with pytest.raises(ConfigError, match="one each"):
        find_models(engine, ServerConfig(more_models=(str(two),), served_model_name=("x",)))


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        find_models(EngineConfig(), ServerConfig(model_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="no folder"):
        find_models(EngineConfig(), ServerConfig(model_dir=str(tmp_path / "none")))


def test_calls_that_compute_nothing_do_not_wait_for_a_model() -> None:
    shelf = Shelf("a", "b")
    with (
        serving(shelf, allow_inline_model_loading=True) as (running, http),
        ThreadPoolExecutor(2) as pool,
    ):
        engine = next(iter(shelf.engines))
        engine.hold = 3
        first = pool.submit(ask, http, "a")
        wait_until(lambda: bool(engine.active))
        second = pool.submit(ask, http, "b")
        wait_until(lambda: running.service.models.num_waiting == 1)
        assert http.post("/api/extra/abort", json={}).status_code == 200
        assert http.get("/v1/models").status_code == 200
        running.do(engine.release)
        assert [text(first.result(TIMEOUT)), text(second.result(TIMEOUT))] == ["I am a.", "I am b."]


def test_ollamas_lists_are_right_with_several_models_and_after_an_unload() -> None:
    shelf = Shelf("one", "two")
    with serving(shelf, admin_key=("secret",), allow_inline_model_loading=True) as (_, http):

        def names(path: str) -> list[str]:
            answer = http.get(path)
            assert answer.status_code == 200, answer.text
            return [model["name"] for model in answer.json()["models"]]

        def shown(name: str) -> Any:
            answer = http.post("/api/show", json={"model": name})
            assert answer.status_code == 200, answer.text
            return answer.json()["model_info"]

        assert (names("/api/tags"), names("/api/ps")) == (["one", "two"], ["one"])
        assert shown("one:latest")["ingle.context_length"] == 1024
        assert "ingle.context_length" not in shown("two")
        answer = http.post("/api/generate", json={"model": "two:latest", "prompt": "x"})
        assert json.loads(answer.text.splitlines()[-1])["done"]
        assert (names("/api/tags"), names("/api/ps")) == (["one", "two"], ["two"])
        assert http.post("/v1/model/unload", headers=ADMIN).status_code == 200
        assert (names("/api/tags"), names("/api/ps")) == (["one", "two"], [])
        assert shown("two")["ingle.context_length"] == 1024
        assert http.post("/api/show", json={"model": "three"}).status_code == 404
        assert shelf.loads == ["one", "two"]
