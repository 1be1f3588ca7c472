"""Tools and thoughts over HTTP: shapes of whole answers and of streams, and the grammars asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_fake_engine import FakeEngine
from server_under_test import Running, running_server

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Any = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"city":"Zürich"}'
HERMES = f'Sure.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
LISTED = f'[{{"name":"weather","arguments":{ARGUMENTS}}},{{"name":"now","arguments":{{}}}}]'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = FakeEngine(chat_template="<tool_call>{{ tools }}")
    with running_server(engine, reasoning_parser="think") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, server: Running, answer: str, **fields: Any) -> Any:
    server.engine.answer = answer
    return client.chat.completions.create(model="fake/model", messages=MESSAGES, **fields)


def streamed(client: openai.OpenAI, server: Running, answer: str, **fields: Any) -> Any:
    """(content, calls as [id, name, arguments], finish reason) of a stream's deltas."""
    text, calls, finish = "", [], None
    for chunk in ask(client, server, answer, stream=True, **fields):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return text, calls, finish


def test_a_call_in_the_text_becomes_a_call(client: openai.OpenAI, server: Running) -> None:
    choice = ask(client, server, HERMES, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure.\n"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert server.engine.seen[-1].params.structured is None


def test_streams_hold_the_same(client: openai.OpenAI, server: Running) -> None:
    text, calls, finish = streamed(client, server, HERMES, tools=TOOLS)
    assert (text, finish) == ("Sure.\n", "tool_calls")
    assert [call[1:] for call in calls] == [["weather", ARGUMENTS]]
    assert calls[0][0].startswith("call_")


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_marks_are_text(client: openai.OpenAI, server: Running, choice: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice} if choice else {}
    message = ask(client, server, HERMES, **fields).choices[0].message
    assert message.content == HERMES
    assert "tool_calls" not in message.model_fields_set


def test_a_named_call_is_the_whole_answer(client: openai.OpenAI, server: Running) -> None:
    choice = ask(client, server, ARGUMENTS, tools=TOOLS, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
    spec = server.engine.seen[-1].params.structured
    assert spec is not None
    assert json.loads(spec.text) == PARAMETERS
    text, calls, finish = streamed(client, server, ARGUMENTS, tools=TOOLS, tool_choice=NAMED)
    assert (text, finish) == ("", "stop")
    assert [call[1:] for call in calls] == [["weather", ARGUMENTS]]


def test_a_required_answer_is_a_list_of_calls(client: openai.OpenAI, server: Running) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    choice = ask(client, server, LISTED, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    names = [call.function.name for call in choice.message.tool_calls]
    assert names == ["weather", "now"]
    spec = server.engine.seen[-1].params.structured
    assert spec is not None
    matcher = server.engine.grammars.matcher(spec)
    text = list(LISTED.encode())
    assert matcher.validate_tokens(text) == len(text)
    assert matcher.validate_tokens(list(b'[{"name":"now","arguments":{}}]')) > 30
    assert matcher.validate_tokens(list(b'[{"name":"weather","arguments":{}')) == 32
    text_and_more = streamed(client, server, LISTED, **fields)
    assert text_and_more[0] == ""
    assert [call[1:] for call in text_and_more[1]] == [["weather", ARGUMENTS], ["now", "{}"]]


def test_no_parallel_calls_means_one_at_most(client: openai.OpenAI, server: Running) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert len(ask(client, server, LISTED, **fields).choices[0].message.tool_calls) == 1
    spec = server.engine.seen[-1].params.structured
    assert spec is not None
    text = list(LISTED.encode())
    assert server.engine.grammars.matcher(spec).validate_tokens(text) < len(text)


def test_allowed_tools_narrow_the_choice(client: openai.OpenAI, server: Running) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    ask(client, server, LISTED, tools=TOOLS, tool_choice=choice)
    spec = server.engine.seen[-1].params.structured
    assert spec is not None
    assert "weather" not in spec.text


def test_a_call_cut_short_is_reported_as_length(client: openai.OpenAI, server: Running) -> None:
    fields = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 6}
    choice = ask(client, server, ARGUMENTS, **fields).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS[:6]


def test_thoughts_have_a_field_of_their_own(client: openai.OpenAI, server: Running) -> None:
    answer = "<think>\nhm 😀</think>\n\nYes."
    message = ask(client, server, answer).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "hm 😀")
    text, thoughts = "", ""
    for chunk in ask(client, server, answer, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
    assert (text, thoughts) == ("Yes.", "hm 😀")


def test_templates_without_tools_get_them_explained() -> None:
    with running_server(FakeEngine(chat_template="{{ messages }}")) as running:
        body = {"model": "fake/model", "messages": MESSAGES, "tools": TOOLS}
        with running.client() as http:
            used = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
            assert http.post("/tokenize", json=body).json()["count"] == used
        first = running.engine.chats[-1].messages[0]
        assert first["role"] == "system"
        assert "weather" in first["content"]


def test_control_tokens_show_where_they_mark_calls() -> None:
    with running_server(tool_call_parser="mistral") as running:
        body = {"model": "fake/model", "messages": MESSAGES}
        with running.client() as http:
            http.post("/v1/chat/completions", json={**body, "tools": TOOLS})
            http.post("/v1/chat/completions", json=body)
    skipped = [seen.params.skip_special_tokens for seen in running.engine.seen]
    assert skipped == [False, True]
