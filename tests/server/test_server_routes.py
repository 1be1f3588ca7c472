"""What the other tests leave over: nulls, defaults, chats in detail, small routes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from server_fake_engine import ANSWER, VOCAB_SIZE, FakeEngine
from server_under_test import Running, running_server

from ingle import EngineConfig
from ingle_server.model_entry import entry_of
from ingle_server.schemas.chat import ChatCompletionRequest
from ingle_server.schemas.completion import CompletionRequest

CHAT = "/v1/chat/completions"


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return http.post(CHAT, json={"model": "fake/model", "messages": messages, **fields})


@pytest.mark.parametrize(
    ("path", "schema", "needed"),
    [
        (CHAT, ChatCompletionRequest, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", CompletionRequest, {"prompt": "hi"}),
    ],
)
def test_null_is_as_good_as_absent(
    http: httpx.Client, path: str, schema: type[msgspec.Struct], needed: dict[str, Any]
) -> None:
    nulls = dict.fromkeys(field.encode_name for field in msgspec.structs.fields(schema))
    body = {**nulls, "user": None, "model": "fake/model", **needed}
    assert http.post(path, json=body).status_code == 200


def test_generation_defaults_stand_where_the_client_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    engine = FakeEngine(generation_defaults=defaults)
    with running_server(engine) as running, running.client() as http:
        ask(http)
        ask(http, temperature=0, top_k=None)
        first, second = (seen.params for seen in engine.seen)
        assert (first.temperature, first.top_k) == (0.6, 20)
        assert (second.temperature, second.top_k) == (0, 20)


def test_messages_reach_the_template_in_its_own_terms(http: httpx.Client, shared: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be kind", "surprise": 1},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "refusal": "no", "content": None},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}, "content": None},
        {"role": "function", "name": "f", "content": "42"},
    ]
    assert ask(http, messages=messages).status_code == 200
    assert shared.engine.chats[-1].messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one\ntwo", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "no"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": None, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "42", "name": "f"},
    ]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({"tools": [TOOL]}, [TOOL]),
        ({"tools": [TOOL], "tool_choice": "auto"}, [TOOL]),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": []}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tool_choice": "none"}, None),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_tools_are_shown_to_the_template(
    http: httpx.Client, shared: Running, fields: dict[str, Any], tools: Any
) -> None:
    answer = ask(http, **fields)
    assert answer.status_code == 200
    assert "tool_calls" not in answer.json()["choices"][0]["message"]
    assert shared.engine.chats[-1].tools == tools


def test_the_last_message_can_be_continued(http: httpx.Client, shared: Running) -> None:
    ask(http, continue_final_message=True, chat_template_kwargs={"enable_thinking": False})
    chat = shared.engine.chats[-1]
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert chat.template_kwargs == {"enable_thinking": False}


def test_a_null_prompt_is_the_start_of_a_document() -> None:
    with running_server(FakeEngine(start_token_id=7)) as running, running.client() as client:
        body = {"model": "fake/model", "prompt": None, "echo": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == 1
        assert running.engine.seen[-1].prompt_token_ids == [7]


def test_the_likeliest_of_several_completions_are_given(
    http: httpx.Client, shared: Running
) -> None:
    body = {"model": "fake/model", "prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 4}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 3 * 4
    assert shared.engine.seen[-1].params.n == 3


def test_a_huge_top_k_keeps_every_token(http: httpx.Client, shared: Running) -> None:
    assert ask(http, top_k=2**70).status_code == 200
    assert shared.engine.seen[-1].params.top_k == VOCAB_SIZE


def test_truncation_keeps_the_last_tokens(http: httpx.Client, shared: Running) -> None:
    body = {"model": "fake/model", "prompt": "abcdef"}
    http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 2})
    assert shared.engine.seen[-1].prompt_token_ids == list(b"ef")
    long = {**body, "prompt": "x" * 1100, "truncate_prompt_tokens": -1, "max_tokens": 24}
    assert http.post("/v1/completions", json=long).status_code == 200
    assert len(shared.engine.seen[-1].prompt_token_ids) == 1000


def test_token_ids_are_returned_on_request(http: httpx.Client) -> None:
    answer = ask(http, return_token_ids=True, max_tokens=2).json()
    assert answer["prompt_token_ids"] == list(b"user: hi\n")
    assert answer["choices"][0]["token_ids"] == list(b"Zo")
    body = {"model": "fake/model", "prompt": "hi", "logprobs": 0, "max_tokens": 2}
    body |= {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:90", "token_id:111"]
    assert choice["token_ids"] == [90, 111]


def test_token_ids_are_streamed_on_request(http: httpx.Client) -> None:
    fields = {"return_token_ids": True, "max_tokens": 2, "stream": True}
    for path, asked, prompt in (
        ("/v1/completions", {"prompt": "hi"}, b"hi"),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, b"user: hi\n"),
    ):
        answer = http.post(path, json={"model": "fake/model", **asked, **fields})
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        known = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        assert known == [list(prompt)]
        made = [token for choice in choices for token in choice.get("token_ids", ())]
        assert made == list(b"Zo")


def test_a_default_limit_is_cut_to_the_context(http: httpx.Client, shared: Running) -> None:
    body = {"model": "fake/model", "prompt": "x" * 1020}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert shared.engine.seen[-1].params.max_tokens == 4
    ask(http)
    assert shared.engine.seen[-1].params.max_tokens == 1024 - len(b"user: hi\n")


def test_cached_tokens_are_reported() -> None:
    engine = FakeEngine()
    engine.num_cached = 5
    with running_server(engine) as running, running.client() as http:
        assert ask(http).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert answer == {
        "count": 2,
        "max_model_len": 1024,
        "tokens": [104, 105],
        "token_strs": ["h", "i"],
    }
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hi"}
    messages = [{"role": "user", "content": "hi"}]
    assert http.post("/tokenize", json={"messages": messages}).json()["count"] == 9
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/detokenize", {"tokens": [10**9]}),
    ):
        assert http.post(path, json=body).status_code == 400
    assert http.post("/tokenize", json={"prompt": "a", "model": "nope"}).status_code == 404


def test_small_routes_answer(http: httpx.Client) -> None:
    health = http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert http.head("/health").status_code == 200
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/v1/plugins").json() == {"plugins": [{"name": "dense", "status": "ok"}]}


def metric(text: str, name: str) -> float:
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert match, f"{name} is missing"
    return float(match[1])


def test_metrics_show_the_engine(http: httpx.Client, shared: Running) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = response.text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metric(text, f"ingle_{name}") == 0
    assert metric(text, "ingle_kv_cache_blocks") == 64
    assert metric(text, "process_resident_memory_bytes") > 1e6
    assert metric(text, "ingle_generation_tokens_total") == shared.engine.num_tokens
    assert metric(text, 'ingle_time_to_first_token_seconds_bucket{le="0.1"}') == 1
    assert metric(text, 'ingle_time_to_first_token_seconds_bucket{le="+Inf"}') == 6
    assert metric(text, "ingle_e2e_request_latency_seconds_sum") == 7.5


@pytest.mark.parametrize(
    ("model", "given", "shown"),
    [
        ("Qwen/Qwen3-8B", (), ("Qwen/Qwen3-8B",)),
        ("/home/me/models/smol", (), ("smol",)),
        ("./smol/", (), ("smol",)),
        ("smol", (), ("smol",)),
        ("/home/me/smol", ("a", "b"), ("a", "b")),
    ],
)
def test_a_folder_is_served_under_its_own_name_only(
    model: str, given: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    assert entry_of(EngineConfig(model=model), given).names == shown


def test_served_names_are_listed_and_understood() -> None:
    with running_server(served_model_name=("one", "two")) as running, running.client() as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["one", "two"]
        assert ask(http, model="two").json()["model"] == "two"
        assert ask(http, model="fake/model").status_code == 404


def test_a_root_path_is_taken_off() -> None:
    with running_server(root_path="/llm", api_key=("k",)) as running, running.client() as http:
        headers = {"authorization": "Bearer k"}
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models", headers=headers).status_code == 200


def test_a_model_without_a_template_says_so() -> None:
    with (
        running_server(FakeEngine(has_chat_template=False)) as running,
        running.client() as http,
    ):
        assert "/v1/completions" in ask(http).json()["error"]["message"]


def test_long_texts_are_tokenised_too() -> None:
    engine = FakeEngine(max_model_len=100_000)
    with running_server(engine) as running, running.client() as http:
        body = {"model": "fake/model", "prompt": "x" * 50_000, "max_tokens": 40}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == ANSWER
        assert answer["usage"]["prompt_tokens"] == 50_000
