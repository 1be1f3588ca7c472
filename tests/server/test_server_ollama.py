"""Ollama's API with its own client."""

from __future__ import annotations

from typing import Any

import httpx
import ollama
import pytest
from server_fake_engine import ANSWER
from server_under_test import Running, running_server

MODEL = "fake/model"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(shared: Running) -> ollama.Client:
    return ollama.Client(host=shared.url)


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_a_conversation_is_answered(client: ollama.Client, name: str) -> None:
    answer = client.chat(model=name, messages=MESSAGES)
    assert (answer.message.role, answer.message.content) == ("assistant", ANSWER)
    assert (answer.model, answer.done, answer.done_reason) == (name, True, "stop")
    assert answer.eval_count == len(ANSWER.encode()) + 1
    assert answer.prompt_eval_count == len(b"user: hi\n")
    assert answer.total_duration > 0


def test_a_stream_is_lines_of_json(client: ollama.Client, http: httpx.Client) -> None:
    parts = list(client.chat(model=MODEL, messages=MESSAGES, stream=True))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count
    plain = http.post("/api/chat", json={"model": MODEL, "messages": MESSAGES})
    assert plain.headers["content-type"].startswith("application/x-ndjson")
    assert plain.headers["x-request-id"]
    assert plain.text.count("\n") > 5


def test_a_prompt_is_a_turn_of_a_chat_unless_raw(client: ollama.Client, shared: Running) -> None:
    answer = client.generate(model=MODEL, prompt="hi", system="Be brief.")
    assert answer.response == ANSWER
    shown = [(m["role"], m["content"]) for m in shared.engine.chats[-1].messages]
    assert shown == [("system", "Be brief."), ("user", "hi")]
    client.generate(model=MODEL, prompt="hi", raw=True)
    assert shared.engine.seen[-1].prompt_token_ids == list(b"hi")
    parts = list(client.generate(model=MODEL, prompt="hi", stream=True))
    assert "".join(part.response for part in parts) == ANSWER


def test_options_reach_the_engine(client: ollama.Client, shared: Running) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "num_predict": 5,
        "seed": 3,
        "stop": ["a", "b", "c", "d", "e"],
        "repeat_penalty": 1.2,
        "num_ctx": 4096,
        "repeat_last_n": 64,
        "min_p": 0.1,
        "typical_p": 0.9,
        "mirostat": 1,
        "mirostat_tau": 5.0,
    }
    answer = client.chat(model=MODEL, messages=MESSAGES, options=options)
    assert answer.done_reason == "length"
    params = shared.engine.seen[-1].params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 7, 5, 3)
    assert (params.repetition_penalty, len(params.stop)) == (1.2, 5)
    assert (params.repetition_penalty_range, params.min_p, params.typical_p) == (64, 0.1, 0.9)
    assert (params.mirostat_mode, params.mirostat_tau) == (2, 5.0)
    client.chat(model=MODEL, messages=MESSAGES, options={"num_predict": 10**6})
    assert shared.engine.seen[-1].params.max_tokens == 1024 - len(b"user: hi\n")


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {}}])
def test_a_format_is_a_grammar(client: ollama.Client, shared: Running, form: Any) -> None:
    client.chat(model=MODEL, messages=MESSAGES, format=form)
    assert shared.engine.seen[-1].params.structured is not None


def test_thoughts_come_apart_and_can_be_turned_off() -> None:
    with running_server(reasoning_parser="think") as running:
        running.engine.answer = "<think>Hm, yes.</think>Hello."
        client = ollama.Client(host=running.url)
        answer = client.chat(model=MODEL, messages=MESSAGES, think=True)
        assert (answer.message.thinking, answer.message.content) == ("Hm, yes.", "Hello.")
        assert running.engine.chats[-1].template_kwargs == {"enable_thinking": True}
        parts = list(client.chat(model=MODEL, messages=MESSAGES, think=True, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == "Hm, yes."
        assert "".join(part.message.content or "" for part in parts) == "Hello."
        client.chat(model=MODEL, messages=MESSAGES, think=False)
        assert running.engine.chats[-1].template_kwargs == {"enable_thinking": False}
        generated = client.generate(model=MODEL, prompt="hi", think=True)
        assert (generated.thinking, generated.response) == ("Hm, yes.", "Hello.")


def test_calls_come_whole() -> None:
    with running_server() as running:
        running.engine.answer = '{"name": "weather", "arguments": {"city": "Rome"}}'
        client = ollama.Client(host=running.url)
        answer = client.chat(model=MODEL, messages=MESSAGES, tools=[TOOL])
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
        parts = list(client.chat(model=MODEL, messages=MESSAGES, tools=[TOOL], stream=True))
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [call.function.arguments for call in calls] == [{"city": "Rome"}]
        turns = [*MESSAGES, answer.message, {"role": "tool", "content": "sun", "tool_name": "w"}]
        client.chat(model=MODEL, messages=turns, tools=[TOOL])
        assert running.engine.chats[-1].messages[-1]["role"] == "tool"


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.context_length for model in client.ps().models] == [1024]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["ingle.context_length"] == 1024


def test_an_empty_request_says_that_the_model_is_loaded(client: ollama.Client) -> None:
    assert client.generate(model=MODEL).done_reason == "load"
    assert client.chat(model=MODEL).done_reason == "load"


def test_the_version_is_told(http: httpx.Client) -> None:
    assert set(http.get("/api/version").json()) == {"version"}


@pytest.mark.parametrize(
    ("path", "change", "status", "named"),
    [
        ("chat", {"model": "no"}, 404, "no"),
        ("chat", {"messages": [{"role": "pope", "content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "images"),
        ("chat", {"options": {"temperature": 9}}, 400, "temperature"),
        ("chat", {"options": {"top_k": "x"}}, 400, "options"),
        ("chat", {"format": "xml"}, 400, "format"),
        ("chat", {"tools": [5]}, 400, "tools"),
        ("generate", {"suffix": "x"}, 400, "suffix"),
        ("generate", {"template": "x"}, 400, "template"),
        ("generate", {"options": {"repeat_penalty": 0}}, 400, "repeat_penalty"),
        ("show", {"model": "no"}, 404, "no"),
    ],
)
def test_mistakes_are_told_in_ollamas_shape(
    http: httpx.Client, path: str, change: dict[str, Any], status: int, named: str
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "prompt": "hi", **change}
    answer = http.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert named in answer.json()["error"]


def test_the_client_raises_what_it_is_told(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="no", messages=MESSAGES)
    assert caught.value.status_code == 404
    assert "does not exist" in caught.value.error
