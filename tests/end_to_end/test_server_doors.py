"""The official clients of every door against a real server process with the demo model."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import pydantic
import pytest
from live_server import LiveServer
from openai import OpenAI

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in one sentence."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CITY = {"type": "string", "maxLength": 12}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)


@pytest.fixture
def client(demo_server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{demo_server.url}/v1", api_key="any", max_retries=0)


def test_chats_are_parsed_streamed_and_call_tools(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=City, temperature=0, max_tokens=64
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=64
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text
    assert "Paris" in text
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    called = client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=200
    )
    for call in called.choices[0].message.tool_calls:
        assert set(json.loads(call.function.arguments)) == {"city"}


def test_responses_are_created_streamed_parsed_and_gone_on_from(client: OpenAI) -> None:
    options: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 64}
    first = client.responses.create(input=QUESTION, **options)
    assert "Paris" in first.output_text
    with client.responses.stream(input=QUESTION, **options) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert "Paris" in stream.get_final_response().output_text
    parsed = client.responses.parse(input=QUESTION, text_format=City, **options)
    assert isinstance(parsed.output_parsed, City)
    following = client.responses.create(
        input="And of Italy?", previous_response_id=first.id, **options
    )
    assert following.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(following.id).output_text == following.output_text


def test_texts_that_mean_the_same_lie_closer(client: OpenAI) -> None:
    texts = ["The cat sleeps on the sofa.", "A cat is asleep on the couch.", "Tax law of 1986"]
    one, two, three = (
        each.embedding for each in client.embeddings.create(model="demo", input=texts).data
    )
    assert _dot(one, one) == pytest.approx(1, abs=1e-4)
    assert _dot(one, two) > _dot(one, three)


def test_anthropics_client_is_answered(demo_server: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=demo_server.url, api_key="any", max_retries=0)
    options: Any = {"model": "demo", "max_tokens": 64, "messages": MESSAGES}
    options["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**options)
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**options) as stream:
        assert "Paris" in "".join(stream.text_stream)
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES)
    used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == used


def test_ollamas_client_is_answered(demo_server: LiveServer) -> None:
    client = ollama.Client(host=demo_server.url)
    options = {"temperature": 0, "num_predict": 64}
    assert "Paris" in client.chat(model="demo", messages=MESSAGES, options=options).message.content
    parts = client.generate(model="demo", prompt=QUESTION, options=options, stream=True)
    assert "Paris" in "".join(part.response for part in parts)
    assert client.list().models[0].model == "demo"


def test_ollamas_format_and_tools_hold(demo_server: LiveServer) -> None:
    client = ollama.Client(host=demo_server.url)
    options = {"temperature": 0, "num_predict": 64}
    ask: Any = {"model": "demo", "messages": MESSAGES, "options": options}
    answer = client.chat(**ask, format=SCHEMA)
    assert set(json.loads(answer.message.content or "")) == {"city"}
    generated = client.generate(model="demo", prompt=QUESTION, format=SCHEMA, options=options)
    assert set(json.loads(generated.response)) == {"city"}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    parts = list(client.chat(**ask, tools=[tool], stream=True))
    assert parts[-1].done
    for call in (call for part in parts for call in part.message.tool_calls or ()):
        assert call.function.name == "weather"
    assert client.ps().models[0].model == "demo"
    assert client.show("demo").capabilities


def test_anthropics_tools_hold(demo_server: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=demo_server.url, api_key="any", max_retries=0)
    tool: Any = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
    answer = client.messages.create(
        model="demo",
        max_tokens=200,
        messages=MESSAGES,
        tools=[tool],
        tool_choice={"type": "tool", "name": "weather"},
    )
    assert answer.stop_reason == "tool_use"
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert set(call.input) == {"city"}  # type: ignore[call-overload]
    with client.messages.stream(
        model="demo", max_tokens=200, messages=MESSAGES, tools=[tool], tool_choice={"type": "any"}
    ) as stream:
        final = stream.get_final_message()
    assert any(block.type == "tool_use" for block in final.content)


def test_kobolds_request_is_answered(demo_server: LiveServer) -> None:
    body = {"prompt": "The capital of France is", "max_length": 8, "temperature": 0, "top_k": 0}
    answer = demo_server.http.post("/api/v1/generate", json=body)
    assert "Paris" in answer.json()["results"][0]["text"]
    streamed = demo_server.http.post("/api/extra/generate/stream", json=body).text
    assert "Paris" in streamed


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
