"""``/v1/responses`` with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pydantic
import pytest
from openai import OpenAI
from server_checks import check_error
from server_fake_engine import ANSWER
from server_under_test import Running, running_server

from ingle_server.responses.store import ResponseStore, StoredResponse
from ingle_server.schemas.responses import ResponseObject

MODEL = "fake/model"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_text_is_answered(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hi", instructions="Be brief.")
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None)
    assert answer.output_text == ANSWER
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert item.id.startswith("msg_")
    assert answer.usage.input_tokens == len(b"system: Be brief.\nuser: hi\n")
    assert answer.usage.output_tokens == len(ANSWER.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.tool_choice, answer.tools, answer.parallel_tool_calls) == ("auto", [], True)
    assert answer.instructions == "Be brief."


def test_the_next_turn_sees_the_one_before(client: OpenAI, shared: Running) -> None:
    first = client.responses.create(model=MODEL, input="one", instructions="Gone next time.")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    shown = shared.engine.chats[-1].messages
    assert [(m["role"], m["content"]) for m in shown] == [
        ("user", "one"),
        ("assistant", ANSWER),
        ("user", "two"),
    ]
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.data[0].content[0].text == "two"
    assert page.has_more


def test_events_come_in_the_official_order(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="hi", stream=True))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == ANSWER
    assert events[0].response.status == "in_progress"
    assert events[2].item.status == "in_progress"
    assert events[2].item.content == []
    last = events[-1].response
    assert (last.status, last.output_text) == ("completed", ANSWER)
    assert last.usage.output_tokens == len(ANSWER.encode()) + 1


def test_frames_name_their_event_and_there_is_no_done(http: httpx.Client) -> None:
    body = {"model": MODEL, "input": "hi", "stream": True}
    text = http.post("/v1/responses", json=body).text
    assert "[DONE]" not in text
    for frame in text.strip().split("\n\n"):
        event, data = frame.split("\n")
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_stream_helper_gives_the_final_response(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi") as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == ANSWER
    assert "response.output_text.delta" in kinds


def test_an_answer_that_is_cut_is_incomplete(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="hi", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    stream = client.responses.create(model=MODEL, input="hi", max_output_tokens=5, stream=True)
    assert list(stream)[-1].type == "response.incomplete"


def test_calls_are_items_of_their_own() -> None:
    with running_server() as running, OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        running.engine.answer = CALL
        options = {"model": MODEL, "input": "hi", "tools": [TOOL]}
        whole = client.responses.create(**options)
        (item,) = whole.output
        assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")
        assert json.loads(item.arguments) == {"city": "Rome"}
        events = list(client.responses.create(**options, stream=True))
        kinds = [e.type for e in events if e.type != "response.function_call_arguments.delta"]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == {"city": "Rome"}
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        client.responses.create(
            model=MODEL, input=[result], tools=[TOOL], previous_response_id=whole.id
        )
        shown = running.engine.chats[-1].messages
        assert shown[-2]["tool_calls"][0]["id"] == item.call_id
        assert (shown[-1]["role"], shown[-1]["tool_call_id"]) == ("tool", item.call_id)


def test_parse_reads_the_text_as_a_model() -> None:
    class City(pydantic.BaseModel):
        name: str

    with running_server() as running, OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        running.engine.answer = '{"name":"Rome"}'
        answer = client.responses.parse(model=MODEL, input="hi", text_format=City)
        assert answer.output_parsed == City(name="Rome")
        assert running.engine.seen[-1].params.structured is not None


def test_logprobs_come_with_the_text(client: OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="hi",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=6,
    )
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 6
    assert len(entries[0].top_logprobs) == 2


def test_a_response_is_kept_until_it_is_deleted(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
    assert client.responses.retrieve(made.id).output_text == ANSWER
    assert client.responses.retrieve(made.id).metadata == {"a": "b"}
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_a_streamed_response_is_kept_too(client: OpenAI) -> None:
    last = list(client.responses.create(model=MODEL, input="hi", stream=True))[-1]
    assert client.responses.retrieve(last.response.id).output_text == ANSWER


def test_store_false_keeps_nothing(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_in_the_background_can_be_cancelled() -> None:
    with running_server() as running, OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        running.engine.hold = 3
        made = client.responses.create(model=MODEL, input="hi", background=True)
        assert made.status == "in_progress"
        assert client.responses.retrieve(made.id).status == "in_progress"
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
        running.do(running.engine.release)
        done = client.responses.create(model=MODEL, input="hi", background=True)
        while client.responses.retrieve(done.id).status == "in_progress":
            pass
        assert client.responses.retrieve(done.id).output_text == ANSWER


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input": []}, "input", None),
        ({"input": 5}, "input", None),
        ({"input": [{"role": "pope", "content": "x"}]}, "input", None),
        ({"input": [{"type": "message", "role": "user", "content": 5}]}, "input", None),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", None),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input", None),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            None,
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "x" * 3000}, "input", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", None),
        ({"top_logprobs": 21}, "top_logprobs", None),
        ({"tools": [{"type": "web_search"}]}, "tools", None),
        ({"tool_choice": {"type": "function", "name": "no"}}, "tool_choice", None),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", None),
        ({"text": {"format": {"type": "sound"}}}, "text.format", None),
        ({"truncation": "some"}, "truncation", None),
        ({"conversation": "conv_1"}, "conversation", None),
        ({"metadata": {"a": 5}}, "metadata", None),
        (
            {"previous_response_id": "resp_no"},
            "previous_response_id",
            "previous_response_not_found",
        ),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, change: dict[str, object], param: str, code: str | None
) -> None:
    body = {"model": MODEL, "input": "hi", **change}
    check_error(http.post("/v1/responses", json=body), 400, param, code)


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"model": "no", "input": "hi"})
    check_error(answer, 404, "model", "model_not_found")


def test_a_failure_in_mid_stream_is_an_event() -> None:
    with running_server() as running, running.client() as http:
        running.engine.row_error = "NaN in /usr/lib"
        body = {"model": MODEL, "input": "hi", "stream": True}
        text = http.post("/v1/responses", json=body).text
        frames = [f.split("\n") for f in text.strip().split("\n\n")]
        assert [event for event, _ in frames[-2:]] == ["event: error", "event: response.failed"]
        last = json.loads(frames[-1][1].removeprefix("data: "))
        assert last["response"]["status"] == "failed"
        assert "/usr" not in text
        assert http.get(f"/v1/responses/{last['response']['id']}").json()["status"] == "failed"


def _stored(name: str, text: str = "") -> StoredResponse:
    response = ResponseObject(
        id=name, created_at=0.0, status="completed", model="m", output=[], reasoning={},
        temperature=1.0, text={}, tool_choice="auto", tools=[], top_p=1.0, metadata={},
        instructions=text,
    )  # fmt: skip
    return StoredResponse(response=response, items=[])


def test_the_store_forgets_the_oldest_beyond_its_bounds() -> None:
    store = ResponseStore(max_responses=2, max_bytes=5000)
    for name in ("a", "b", "c"):
        store.put(_stored(name))
    assert not store.has("a")
    assert len(store) == 2
    store.put(_stored("d", "x" * 4000))
    assert [store.has(name) for name in "bcd"] == [False, True, True]
