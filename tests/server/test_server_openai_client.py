"""The official client against the server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from server_fake_engine import ANSWER
from server_under_test import Running

MODEL = "fake/model"
MESSAGES = [{"role": "user", "content": "hi"}]
NUM_TOKENS = len(ANSWER.encode()) + 1
NUM_PROMPT = len(b"user: hi\n")


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_chat_is_answered(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == NUM_PROMPT
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.total_tokens == NUM_PROMPT + NUM_TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


def test_a_streamed_chat_equals_the_plain_one(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    *content, last, usage = chunks
    assert "".join(chunk.choices[0].delta.content for chunk in content) == ANSWER
    assert {chunk.choices[0].finish_reason for chunk in content} == {None}
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == NUM_TOKENS
    assert {chunk.usage for chunk in (*content, last)} == {None}


def test_n_choices_at_temperature_zero_are_equal(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {ANSWER}
    assert answer.usage.prompt_tokens == NUM_PROMPT
    assert answer.usage.completion_tokens == 3 * NUM_TOKENS


def test_n_streamed_choices_are_complete(client: OpenAI) -> None:
    texts = {0: "", 1: ""}
    ends = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == {0: ANSWER, 1: ANSWER}
    assert ends == {0: "stop", 1: "stop"}


def test_chat_logprobs_rebuild_the_text_byte_by_byte(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == NUM_TOKENS
    assert bytes(b for entry in entries for b in entry.bytes).decode() == ANSWER
    assert [len(entry.top_logprobs) for entry in entries] == [3] * NUM_TOKENS
    assert entries[0].top_logprobs[2].logprob == -9999.0


def test_streamed_logprobs_equal_plain_ones(client: OpenAI) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    plain = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == plain


def test_the_newer_token_limit_wins(client: OpenAI, shared: Running) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=9, max_completion_tokens=5
    )
    assert answer.choices[0].message.content == "Zoë "
    assert answer.choices[0].finish_reason == "length"
    assert shared.engine.seen[-1].params.max_tokens == 5


def test_a_completion_stops_after_sixteen_tokens_by_default(
    client: OpenAI, shared: Running
) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert shared.engine.seen[-1].params.max_tokens == 16


def test_several_prompts_give_choices_prompt_by_prompt(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["one", "three"], n=2, max_tokens=3, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "thr", "thr"]
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_all_four_forms_of_a_prompt_reach_the_engine(
    client: OpenAI, shared: Running, prompt: object
) -> None:
    client.completions.create(model=MODEL, prompt=prompt)
    assert shared.engine.seen[-1].prompt_token_ids == [104, 105]


def test_completion_logprobs_have_one_entry_per_token(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi", logprobs=2, max_tokens=9)
    logprobs = answer.choices[0].logprobs
    text = answer.choices[0].text
    assert {len(logprobs.tokens), len(logprobs.token_logprobs)} == {9}
    assert {len(logprobs.top_logprobs), len(logprobs.text_offset)} == {9}
    for token, offset, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs, strict=True
    ):
        assert token in top
        assert len(top) <= 3
        assert token == "�" or text[offset : offset + len(token)] == token


def test_a_streamed_completion_equals_the_plain_one(client: OpenAI) -> None:
    options = {"model": MODEL, "prompt": ["a", "bc"], "max_tokens": 50, "logprobs": 1}
    plain = client.completions.create(**options)
    texts = {0: "", 1: ""}
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in client.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.logprobs:
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == {choice.index: choice.text for choice in plain.choices}
    assert offsets == {c.index: c.logprobs.text_offset for c in plain.choices}


def test_echo_comes_first_in_a_stream(client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=[104, 105], echo=True, max_tokens=2, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "hiZo"


def test_echo_alone_generates_nothing(client: OpenAI, shared: Running) -> None:
    before = len(shared.engine.seen)
    answer = client.completions.create(model=MODEL, prompt="hi", echo=True, max_tokens=0)
    assert answer.choices[0].text == "hi"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert len(shared.engine.seen) == before


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert card.object == "model"
    assert card.owned_by == "ingle"
    assert card.max_model_len == 1024
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_extra_fields_reach_the_engine(client: OpenAI, shared: Running) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stop=["a", "b"],
        seed=7,
        logit_bias={"65": -100, "66": 2},
        presence_penalty=1,
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [5],
            "min_tokens": 2,
            "ignore_eos": False,
            "cache_salt": "salt",
            "an_unknown_field": {"x": [1]},
        },
    )
    params = shared.engine.seen[-1].params
    assert params.stop == ("a", "b")
    assert (params.seed, params.top_k, params.min_p) == (7, -1, 0.1)
    assert params.logit_bias == {65: -100.0, 66: 2.0}
    assert (params.presence_penalty, params.repetition_penalty) == (1, 1.1)
    assert (params.stop_token_ids, params.min_tokens, params.cache_salt) == ((5,), 2, "salt")


def test_client_mistakes_have_the_right_class_and_fields(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="hi")
    assert missing.value.code == "model_not_found"
