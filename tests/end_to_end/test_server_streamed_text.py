"""Streamed text is the whole text, and the bytes of logprobs rebuild both: fifty mixed prompts.

In float32, where an answer does not depend on who else is in the batch. Ten of the prompts are in
the quick suite, all fifty in the slow one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
from live_server import LiveServer
from mixed_prompts import FEW, PROMPTS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
AT_ONCE = 25
PATIENCE = 240.0
"""Seconds; so long because all prompts are asked at once, and machines may be busy."""
SETS = [
    pytest.param(FEW, id="10"),
    pytest.param(PROMPTS, id="50", marks=[pytest.mark.slow, pytest.mark.long]),
]


def test_there_are_fifty_prompts() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 50
    assert len(FEW) == 10


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, however it came; ``tokens`` are a chat's, by name and bytes.

    Log-probabilities themselves differ in their last bits with the batch, and are left out.
    """

    text: str
    finish: str
    stop: str | int | None
    tokens: tuple[tuple[str, bytes], ...] = ()

    @property
    def raw(self) -> bytes:
        """The bytes of its tokens."""
        return b"".join(raw for _, raw in self.tokens)


def body_of(path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {}
    asked = said or {"prompt": prompt}
    wants = {"logprobs": True} if path == CHAT else {}
    return {"model": "demo", "max_tokens": 12, "temperature": 0, **asked, **wants, **fields}


def tokens_of(choice: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Name and bytes of a choice's tokens; completions were asked for none."""
    entries = (choice["logprobs"] or {}).get("content", ())
    return [(entry["token"], bytes(entry["bytes"])) for entry in entries]


def whole(server: LiveServer, path: str, body: dict[str, Any]) -> Answer:
    response = server.http.post(path, json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return Answer(text, choice["finish_reason"], choice["stop_reason"], tuple(tokens_of(choice)))


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> Answer:
    """Every event decoded on its own: half a character in one would not be UTF-8."""
    texts: list[str] = []
    tokens: list[tuple[str, bytes]] = []
    finish, stop = "", None
    with server.http.stream(
        "POST", path, json={**body, "stream": True}, timeout=PATIENCE
    ) as response:
        assert response.status_code == 200
        data = b"".join(response.iter_bytes())
    *events, done, end = data.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    for event in events:
        choice = json.loads(event.removeprefix(b"data: ").decode())["choices"][0]
        texts.append((choice["delta"].get("content") or "") if path == CHAT else choice["text"])
        tokens += tokens_of(choice)
        finish, stop = choice["finish_reason"] or finish, choice.get("stop_reason") or stop
    return Answer("".join(texts), finish, stop, tuple(tokens))


def at_once(work: Callable[[str], None], prompts: Sequence[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, prompts))


def check_bytes(answer: Answer) -> None:
    """The tokens' bytes are the text; a token that ended the answer is in no text."""
    raw = answer.raw
    if answer.finish == "stop":
        raw = raw.removesuffix(b"<|im_end|>")
    text = raw.decode(errors="replace")
    assert answer.text == text, (answer.text, text)


@pytest.mark.parametrize("prompts", SETS)
def test_streamed_texts_are_the_whole_ones(
    exact_server: LiveServer, prompts: Sequence[str]
) -> None:
    def both(prompt: str) -> None:
        for path in (CHAT, COMPLETIONS):
            body = body_of(path, prompt)
            answer = whole(exact_server, path, body)
            assert streamed(exact_server, path, body) == answer
            if path == CHAT:
                check_bytes(answer)

    at_once(both, prompts)


@pytest.mark.parametrize("prompts", SETS)
def test_bytes_rebuild_texts_of_torn_characters(
    exact_server: LiveServer, prompts: Sequence[str]
) -> None:
    """So hot that tokens which are parts of characters come in any order."""
    torn: list[bool] = []

    def hot(prompt: str) -> None:
        body = body_of(CHAT, prompt, temperature=2.0, seed=7, top_logprobs=2)
        body["logit_bias"] = {str(part): 12 for part in range(100, 256)}
        answer = whole(exact_server, CHAT, body)
        check_bytes(answer)
        assert streamed(exact_server, CHAT, body) == answer
        torn.append(any("\ufffd" in name for name, _ in answer.tokens))

    at_once(hot, prompts)
    assert sum(torn) >= len(prompts) // 2


def straddling(answer: Answer) -> str | None:
    """Two characters of the answer, the last of one token and the first of the next."""
    ends = list(accumulate(len(raw) for _, raw in answer.tokens))
    for end in ends[2:-1]:
        before = answer.raw[:end].decode(errors="ignore")
        if before.encode() != answer.raw[:end] or len(before) >= len(answer.text):
            continue  # ends inside a character
        stop = answer.text[len(before) - 1 : len(before) + 1]
        if answer.text.index(stop) == len(before) - 1 and len(stop) == 2:
            return stop
    return None


@pytest.mark.parametrize("prompts", SETS)
def test_stop_strings_across_tokens_cut_both_alike(
    exact_server: LiveServer, prompts: Sequence[str]
) -> None:
    found: list[str] = []

    def cut(prompt: str) -> None:
        told = whole(exact_server, CHAT, body_of(CHAT, prompt))
        stop = straddling(told)
        if stop is None:
            return
        found.append(stop)
        for path in (CHAT, COMPLETIONS):
            text = told.text
            if path == COMPLETIONS:
                text = whole(exact_server, path, body_of(path, prompt)).text
                stop = text[3:6] or text[:1]
                if not stop:
                    return  # this prompt's completion is empty
            for keep in (False, True):
                body = body_of(
                    path, prompt, stop=["\0never", stop], include_stop_str_in_output=keep
                )
                answer = whole(exact_server, path, body)
                end = text.index(stop) + (len(stop) if keep else 0)
                assert (answer.text, answer.finish, answer.stop) == (text[:end], "stop", stop)
                again = streamed(exact_server, path, body)
                assert (again.text, again.finish, again.stop) == (text[:end], "stop", stop)
                assert again.tokens == answer.tokens

    at_once(cut, prompts)
    assert len(found) >= len(prompts) * 3 // 4, found
