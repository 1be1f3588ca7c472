"""The helpers of the official ``openai`` client against a real server process, sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from live_server import LiveServer
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in one sentence."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Place(pydantic.BaseModel):
    """A place, bounded so that a small model comes to an end."""

    city: str = pydantic.Field(max_length=12)
    kind: Literal["town", "capital"]


class Weather(pydantic.BaseModel):
    """Ask for the weather."""

    city: str = pydantic.Field(max_length=12)
    days: Literal[1, 2, 3]


WEATHER: Any = openai.pydantic_function_tool(Weather)
NAMED: Any = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture
def client(demo_server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{demo_server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_parse_reads_content_and_arguments_of_tools(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Place, max_tokens=80, n=2
    )
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Place)
    called = client.chat.completions.parse(
        model="demo", messages=MESSAGES, tools=[WEATHER], tool_choice=NAMED, max_tokens=80
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_cut_answer_is_the_clients_own_error(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Place, max_tokens=3
        )
    assert caught.value.completion.choices[0].finish_reason == "length"
    with (
        pytest.raises(openai.LengthFinishReasonError),
        client.chat.completions.stream(
            model="demo", messages=MESSAGES, response_format=Place, max_tokens=3
        ) as stream,
    ):
        stream.until_done()


def test_the_stream_helper_tells_content_and_logprobs(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo",
        messages=MESSAGES,
        response_format=Place,
        temperature=0,
        max_tokens=80,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (done,) = [event for event in events if event.type == "content.done"]
    deltas = [event for event in events if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == done.content == deltas[-1].snapshot
    assert isinstance(done.parsed, Place)
    assert final.choices[0].message.parsed == done.parsed
    (logprobs,) = [event for event in events if event.type == "logprobs.content.done"]
    raw = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert raw.decode().startswith(done.content)
    assert final.usage is not None
    assert final.usage.completion_tokens == len(logprobs.content)


def test_the_stream_helper_tells_the_calls_of_tools(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=300
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    calls = final.choices[0].message.tool_calls or []
    assert final.choices[0].finish_reason == "tool_calls"
    assert [event.arguments for event in done] == [call.function.arguments for call in calls]
    for call, event in zip(calls, done, strict=True):
        assert isinstance(call.function.parsed_arguments, Weather)
        assert event.name == "Weather"
        parts = [delta for delta in deltas if delta.index == event.index]
        assert "".join(part.arguments_delta for part in parts) == event.arguments


def test_a_tools_result_is_taken_back(client: OpenAI) -> None:
    first = client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=[WEATHER], tool_choice=NAMED, max_tokens=80
    )
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Rain, 12 degrees."}
    second = client.chat.completions.create(
        model="demo", messages=[*MESSAGES, message, result], tools=[WEATHER], max_tokens=8
    )
    assert second.usage is not None
    assert second.choices[0].message.content
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_responses_are_parsed_and_streamed_with_their_items(client: OpenAI) -> None:
    options: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 80}
    parsed = client.responses.parse(input=QUESTION, text_format=Place, **options)
    assert isinstance(parsed.output_parsed, Place)
    with client.responses.stream(input=QUESTION, text_format=Place, **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == final.output_text == parsed.output_text
    assert final.output_parsed == parsed.output_parsed
    items = client.responses.input_items.list(final.id).data
    assert [item.type for item in items] == ["message"]
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)


def test_responses_call_tools_and_take_results(client: OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "Weather",
        "parameters": WEATHER["function"]["parameters"],
        "strict": True,
    }
    options: Any = {"model": "demo", "tools": [tool], "max_output_tokens": 100}
    with client.responses.stream(input=QUESTION, tool_choice="required", **options) as stream:
        events = list(stream)
        first = stream.get_final_response()
    calls = [item for item in first.output if item.type == "function_call"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments for call in calls]
    assert Weather.model_validate_json(calls[0].arguments)
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        for call in calls
    ]
    second = client.responses.create(
        input=results, previous_response_id=first.id, tool_choice="none", **options
    )
    assert second.previous_response_id == first.id
    assert second.output_text


def test_raw_and_streaming_responses_show_the_headers(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=MESSAGES, max_tokens=2
    )
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse().choices[0].finish_reason == "length"
    with client.chat.completions.with_streaming_response.create(
        model="demo", messages=MESSAGES, max_tokens=2, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == ""


def test_mistakes_are_the_clients_own_classes(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_the_async_client_streams_side_by_side(demo_server: LiveServer) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="demo", prompt=f"{number}, ", max_tokens=5, stream=True, temperature=0
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everything() -> list[str]:
        async with AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key="any") as client:
            async with client.chat.completions.stream(
                model="demo", messages=MESSAGES, temperature=0, max_tokens=32
            ) as stream:
                final = await stream.get_final_completion()
            assert "Paris" in (final.choices[0].message.content or "")
            return list(await asyncio.gather(*(one(client, number) for number in range(8))))

    assert all(asyncio.run(everything()))
