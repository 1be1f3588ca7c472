"""What a real server with the demo model says: the same text streamed or whole, alone or not.

In float32: in 16 bits a row's last bits depend on who else is in the batch and on how much of the
prompt was cached, and near ties fall either way.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

PROMPTS = (
    "What is the capital of France?",
    "Répète exactement : déjà vu, œuvre, cœur, naïve.",
    "Repeat: 👩‍👩‍👧‍👦🏳️‍🌈🇫🇷 and then more emoji: 😀😃😄😁",
    "请重复：你好，世界。今天天气很好。",
    "こんにちは、元気ですか。東京は大きいです。",
    "한국어로 인사해 주세요: 안녕하세요 세계",
    "كرر: مرحبا بالعالم، كيف حالك اليوم؟",
    "שלום עולם",
    "Повтори: Привет, мир!",
    "हिन्दी में नमस्ते लिखो",
    "def f(x):\n\treturn x  # tabs and\r\nnewlines",
    "  leading and trailing spaces  ",
    "<|im_end|> is not a control token here",
    "Ω≈ç√∫˜µ≤≥÷ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "a\u0301e\u0301i\u0301 combining",
    "\u200f\u202eright to left",
    '{"json": [1, 2, null]}',
    "List ten fruits, one on each line.",
    "2+2=4, 3+3=6, 4+4=",
    "z" * 200,
)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0, **fields}


def whole(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def frames(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *lines, done = [line for line in response.text.split("\n\n") if line and line[0] != ":"]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed_text(server: LiveServer, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a streamed chat, and its finish reason."""
    choices = [frame["choices"][0] for frame in frames(server, CHAT, body) if frame["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"]


def test_streamed_answers_are_the_whole_ones(exact_server: LiveServer) -> None:
    """Twenty prompts at once, each asked both ways."""

    def both(text: str) -> tuple[tuple[str, str], tuple[str, str]]:
        choice = whole(exact_server, CHAT, chat(text))["choices"][0]
        content = choice["message"]["content"]
        return (content, choice["finish_reason"]), streamed_text(exact_server, chat(text))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(both, PROMPTS))
    for at_once, streamed in answers:
        assert at_once == streamed
        assert "\ufffd" not in at_once[0][:-1]


@pytest.mark.parametrize("cut", range(2, 20, 5))
def test_a_stop_string_across_tokens_cuts_both_alike(exact_server: LiveServer, cut: int) -> None:
    """Stop strings are windows of five characters of the answer itself, wherever tokens end."""
    body = chat("What is the capital of France? Answer in one long sentence.", max_tokens=16)
    content = whole(exact_server, CHAT, body)["choices"][0]["message"]["content"]
    stop = content[cut : cut + 5]
    choice = whole(exact_server, CHAT, {**body, "stop": [stop]})["choices"][0]
    assert choice["message"]["content"] == content[: content.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    streamed = streamed_text(exact_server, {**body, "stop": [stop]})
    assert streamed == (choice["message"]["content"], "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_the_bytes_of_logprobs_are_the_text(
    exact_server: LiveServer, demo_model_dir: Path, stream: bool
) -> None:
    file = json.loads((demo_model_dir / "tokenizer.json").read_text())
    unsaid = {token["content"] for token in file["added_tokens"]}  # in no text; drawn now and then
    for text in ("Say 👩‍👩‍👧‍👦 and 😀😃🏳️‍🌈", "请重复：你好，世界"):
        body = chat(text, logprobs=True, top_logprobs=3, temperature=1.5, seed=3, max_tokens=24)
        if stream:
            choices = [f["choices"][0] for f in frames(exact_server, CHAT, body)]
            content = "".join(choice["delta"].get("content") or "" for choice in choices)
            entries = [e for c in choices if c.get("logprobs") for e in c["logprobs"]["content"]]
        else:
            choice = whole(exact_server, CHAT, body)["choices"][0]
            content, entries = choice["message"]["content"], choice["logprobs"]["content"]
        raw = b"".join(bytes(e["bytes"]) for e in entries if e["token"] not in unsaid)
        assert raw.decode(errors="replace").startswith(content)
        assert len(raw) - len(content.encode()) <= 4
        for entry in entries:
            ranked = [top["logprob"] for top in entry["top_logprobs"]]
            assert ranked == sorted(ranked, reverse=True)
            assert entry["logprob"] <= ranked[0] + 1e-6


def test_a_seed_gives_the_same_alone_and_among_sixteen(exact_server: LiveServer) -> None:
    body = chat("Invent a name for a cat.", temperature=1.0, seed=11)
    alone = whole(exact_server, CHAT, body)["choices"][0]["message"]["content"]

    def ask(number: int) -> str:
        mine = body if number % 4 == 0 else chat(PROMPTS[number], temperature=1.0, seed=number)
        return str(whole(exact_server, CHAT, mine)["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert {answers[number] for number in (0, 4, 8, 12)} == {alone}


def test_n_answers_have_their_own_indices_and_texts(exact_server: LiveServer) -> None:
    body = chat("Invent a word.", n=5, temperature=1.2, seed=5)
    answer = whole(exact_server, CHAT, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(5))
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 5
    streamed = dict.fromkeys(range(5), "")
    for frame in frames(exact_server, CHAT, body):
        for choice in frame["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert list(streamed.values()) == texts
    once = whole(exact_server, CHAT, {**body, "n": 1})
    assert answer["usage"]["prompt_tokens"] == once["usage"]["prompt_tokens"]


def test_a_second_turn_computes_only_what_is_new(exact_server: LiveServer) -> None:
    first = chat("Name three rivers of Africa, please, and say how long each is.")
    answer = whole(exact_server, CHAT, first)
    said = answer["choices"][0]["message"]
    second = {
        **first,
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": "And of Asia?"},
        ],
    }
    usage = whole(exact_server, CHAT, second)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    known = answer["usage"]["prompt_tokens"]
    assert known <= cached < usage["prompt_tokens"]
    again = whole(exact_server, CHAT, second)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
