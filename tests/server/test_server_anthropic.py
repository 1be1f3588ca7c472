"""``/v1/messages`` with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from server_fake_engine import ANSWER
from server_under_test import Running, running_server

MODEL = "fake/model"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
FORCED = {"any": f"[{CALL}]", "tool": '{"city":"Rome"}'}


def _client(running: Running, key: str = "any") -> Anthropic:
    return Anthropic(base_url=running.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[Anthropic]:
    with _client(shared) as client:
        yield client


def test_a_conversation_is_answered(client: Anthropic, shared: Running) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=100,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": "ho"},
            {"role": "user", "content": [{"type": "text", "text": "hm"}]},
        ],
        extra_body={"temperature": 0.5, "top_k": 5},
    )
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in answer.content] == [("text", ANSWER)]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(ANSWER.encode()) + 1
    params = shared.engine.seen[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 5, 100)
    shown = [(m["role"], m["content"]) for m in shared.engine.chats[-1].messages]
    assert shown == [("system", "Be brief."), ("user", "hi"), ("assistant", "ho"), ("user", "hm")]


def test_events_come_in_the_official_order(client: Anthropic) -> None:
    stream = client.messages.create(model=MODEL, max_tokens=100, messages=MESSAGES, stream=True)
    events = list(stream)
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == ANSWER
    assert events[0].message.content == []
    assert events[0].message.stop_reason is None
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == len(ANSWER.encode()) + 1


def test_the_stream_helper_gives_the_final_message(client: Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().content[0].text == ANSWER


def test_a_cut_answer_says_max_tokens(client: Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=5, messages=MESSAGES)
    assert answer.stop_reason == "max_tokens"


def test_stop_sequences_reach_the_engine(client: Anthropic, shared: Running) -> None:
    client.messages.create(model=MODEL, max_tokens=5, messages=MESSAGES, stop_sequences=["a"])
    assert shared.engine.seen[-1].params.stop == ("a",)


def test_tools_are_called_and_their_results_read() -> None:
    with running_server() as running, _client(running) as client:
        running.engine.answer = CALL
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
        answer = client.messages.create(messages=MESSAGES, **options)
        assert answer.stop_reason == "tool_use"
        (block,) = answer.content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Rome"})
        with client.messages.stream(messages=MESSAGES, **options) as stream:
            final = stream.get_final_message()
        assert final.content[0].input == {"city": "Rome"}
        assert final.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        client.messages.create(messages=turns, **options)
        shown = running.engine.chats[-1].messages
        assert [m["role"] for m in shown[-4:]] == ["user", "assistant", "tool", "user"]
        assert shown[-2]["tool_call_id"] == block.id
        assert shown[-3]["tool_calls"][0]["id"] == block.id


def test_any_tool_forces_a_call(client: Anthropic, shared: Running) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        client.messages.create(
            model=MODEL, max_tokens=9, messages=MESSAGES, tools=[TOOL], tool_choice=choice
        )
        assert shared.engine.seen[-1].params.structured is not None


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_ends_as_a_call(choice: Any) -> None:
    with running_server() as running, _client(running) as client:
        running.engine.answer = FORCED[choice["type"]]
        options: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
        answer = client.messages.create(messages=MESSAGES, tool_choice=choice, **options)
        assert [block.type for block in answer.content] == ["tool_use"]
        assert answer.stop_reason == "tool_use"
        with client.messages.stream(messages=MESSAGES, tool_choice=choice, **options) as stream:
            assert stream.get_final_message().stop_reason == "tool_use"


def test_tokens_are_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="x")
    assert counted.input_tokens == len(b"system: x\nuser: hi\n")


def test_a_last_turn_of_the_assistant_is_gone_on_from(client: Anthropic, shared: Running) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    client.messages.create(model=MODEL, max_tokens=5, messages=turns)
    assert shared.engine.chats[-1].continue_final_message
    assert not shared.engine.chats[-1].add_generation_prompt


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": ["a"] * 9}, "stop_sequences"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20260209", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ],
)
def test_mistakes_are_told_in_anthropics_shape(
    http: httpx.Client, change: dict[str, Any], named: str
) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES, **change}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    told = answer.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert named in told["error"]["message"]


def test_errors_have_the_clients_classes(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude-9", max_tokens=5, messages=MESSAGES)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with running_server(api_key=("secret",)) as running:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            _client(running, "wrong").messages.create(model=MODEL, max_tokens=5, messages=MESSAGES)
        assert refused.value.body["error"]["type"] == "authentication_error"
        right = _client(running, "secret")
        assert right.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES).content


def test_a_failure_in_mid_stream_is_an_event() -> None:
    with running_server() as running, running.client() as http:
        running.engine.row_error = "NaN in /usr/lib"
        body = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES, "stream": True}
        text = http.post("/v1/messages", json=body).text
        event, data = text.strip().split("\n\n")[-1].split("\n")
        assert event == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
        assert "/usr" not in text
