"""Log-probabilities of the prompt: ``prompt_logprobs``, and ``echo`` with ``logprobs``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from server_under_test import Running

MODEL = "fake/model"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ENTRY = {
    "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
    "105": {"logprob": -1.5, "rank": 3, "decoded_token": "i"},
}


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_completion_reports_every_prompt_token_but_the_first(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["hi", "i"], n=2, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    found = [choice.model_extra["prompt_logprobs"] for choice in answer.choices]
    assert found == [[None, ENTRY], [None, ENTRY], [None], [None]]


def test_a_chat_reports_them_beside_its_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"prompt_logprobs": 0}
    )
    found = answer.model_extra["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == answer.usage.prompt_tokens
    assert found[1] == {"115": {"logprob": -1.5, "rank": 3, "decoded_token": "s"}}


def test_nobody_who_did_not_ask_gets_them(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi", echo=True, logprobs=1)
    assert "prompt_logprobs" not in answer.choices[0].model_extra


def test_an_echo_with_logprobs_has_the_prompts_before_the_answers(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hi", echo=True, logprobs=2, max_tokens=2
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text == "hiZo"
    assert logprobs.tokens == ["h", "i", "Z", "o"]
    assert logprobs.token_logprobs == [None, -1.5, -0.5, -0.5]
    assert logprobs.top_logprobs[:2] == [None, {"A": -0.1, "B": -0.2, "i": -1.5}]
    assert logprobs.text_offset == [0, 1, 2, 3]


def test_an_echo_alone_scores_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hi you", echo=True, logprobs=0, max_tokens=0
    )
    (choice,) = answer.choices
    assert choice.text == "hi you"
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == list("hi you")
    assert choice.logprobs.token_logprobs == [None] + [-1.5] * 5
    assert answer.usage.completion_tokens == 0


def test_a_token_that_the_text_does_not_show_takes_no_room(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[256, 104, 105], echo=True, logprobs=0, max_tokens=1
    )
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2]


def test_a_streamed_echo_with_logprobs_equals_the_plain_one(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["hi", "you"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 5,
    }
    plain = client.completions.create(**options)
    texts, tokens = dict.fromkeys(range(4), ""), {index: [] for index in range(4)}
    for chunk in client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
    assert texts == {choice.index: choice.text for choice in plain.choices}
    assert tokens == {choice.index: choice.logprobs.tokens for choice in plain.choices}


def test_a_stream_cannot_have_prompt_logprobs(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="prompt_logprobs cannot be streamed"):
        client.completions.create(
            model=MODEL, prompt="hi", stream=True, extra_body={"prompt_logprobs": 1}
        )


def test_a_prompt_may_fill_the_context_when_nothing_is_to_follow(
    client: OpenAI, shared: Running
) -> None:
    longest = shared.engine.info.max_model_len
    answer = client.completions.create(
        model=MODEL, prompt=[104] * longest, echo=True, logprobs=0, max_tokens=0
    )
    assert len(answer.choices[0].logprobs.tokens) == longest
    with pytest.raises(BadRequestError):
        client.completions.create(model=MODEL, prompt=[104] * longest, max_tokens=1)
