"""A real server with the demo model under load and abuse: it answers, frees and stays."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
import pytest
from live_server import LiveServer

MODEL = "demo"
IDLE_SECONDS = 5.0


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def client(server: LiveServer, **options: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        **{"base_url": server.url, "timeout": 120.0, "limits": limits, **options}
    )


def wait_until_idle(server: LiveServer) -> None:
    """Robustness §2: running, waiting and used blocks are back at zero within five seconds."""
    deadline = time.monotonic() + IDLE_SECONDS
    while not server.is_idle():
        assert time.monotonic() < deadline, server.gauges()


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def gather(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    return list(await asyncio.gather(*work))


def test_32_concurrent_streams_complete_with_the_right_usage(demo_server: LiveServer) -> None:
    texts = [f"Tell me {number} facts about the number {number}." for number in range(32)]
    lengths = [
        demo_server.http.post("/tokenize", json=chat(text)).json()["count"] for text in texts
    ]

    async def one(http: httpx.AsyncClient, text: str, number: int) -> dict[str, Any]:
        body = chat(
            text,
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=8 + number % 9,
            logprobs=True,
            temperature=0.8,
        )
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            frames = [frame async for frame in events(response)]
        *frames, last = frames
        choices = [frame["choices"][0] for frame in frames]
        return {
            "tokens": sum(len(c["logprobs"]["content"]) for c in choices if c.get("logprobs")),
            "reasons": [c["finish_reason"] for c in choices if c["finish_reason"]],
            "usage": last["usage"],
            "asked": body["max_tokens"],
        }

    async def everything() -> list[dict[str, Any]]:
        async with client(demo_server) as http:
            return await gather(*(one(http, text, i) for i, text in enumerate(texts)))

    for answer, length in zip(asyncio.run(everything()), lengths, strict=True):
        usage = answer["usage"]
        assert usage["prompt_tokens"] == length
        assert usage["completion_tokens"] == answer["tokens"] <= answer["asked"]
        assert usage["total_tokens"] == length + answer["tokens"]
        expected = "length" if answer["tokens"] == answer["asked"] else "stop"
        assert len(answer["reasons"]) == 1
        assert answer["reasons"] == [expected] or answer["reasons"] == ["stop"]
    wait_until_idle(demo_server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_hundred_disconnects_leave_nothing_held(demo_server: LiveServer, stream: bool) -> None:
    async def leave(http: httpx.AsyncClient, number: int) -> None:
        body = chat(f"Count to {number}.", max_tokens=2000, stream=stream, n=1 + number % 2)
        body["ignore_eos"] = True  # a short answer would be there before the client has left
        if not stream:
            with pytest.raises(httpx.TimeoutException):
                await http.post("/v1/chat/completions", json=body, timeout=0.5 + number / 100)
            return
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for frame in events(response):
                if frame["choices"][0]["delta"].get("content"):
                    return

    async def everything() -> None:
        async with client(demo_server) as http:
            await gather(*(leave(http, number) for number in range(100)))

    asyncio.run(everything())
    wait_until_idle(demo_server)
    assert demo_server.http.get("/load").json() == {"server_load": 0}


def test_an_abort_storm_is_followed_by_a_quick_answer(demo_server: LiveServer) -> None:
    """64 chats of 4,000 tokens with half a second of patience; then ten tokens for somebody."""

    async def give_up(http: httpx.AsyncClient, number: int) -> None:
        body = chat(f"Write a long story about {number} dragons.", max_tokens=4000)
        body["ignore_eos"] = True
        with pytest.raises(httpx.TimeoutException):
            await http.post("/v1/chat/completions", json=body, timeout=0.5)

    async def everything() -> None:
        async with client(demo_server) as http:
            await gather(*(give_up(http, number) for number in range(64)))

    asyncio.run(everything())
    answer = demo_server.http.post(
        "/v1/chat/completions", json=chat("Hi", max_tokens=10), timeout=15
    )
    assert answer.status_code == 200
    wait_until_idle(demo_server)
