"""Requests that are wrong, odd or costly, and what a server answers to many of them."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
from live_server import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
AT_ONCE = 16
JUNK = [b"", b"{", b"\xff" * 1000, b"[" * 100_000, b'{"model":"demo","prompt":"\\ud800"}']
GRAMMARS: list[Any] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "hiccup"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}},
    {"type": "sound"},
]


def odd_fields(rng: random.Random) -> list[dict[str, Any]]:
    """Fields of a completion, one dictionary of each kind."""
    ids = [rng.randrange(49152) for _ in range(rng.randrange(1, 300))]
    return [
        {"prompt": ids},
        {"prompt": [ids, ids[:1]]},
        {"prompt": "\0\ufffe\U0010ffff" * rng.randrange(1, 50)},
        {"prompt": "👩‍👩‍👧‍👦" * rng.randrange(1, 100), "logprobs": 20, "echo": True},
        {"prompt": [10 ** rng.randrange(6, 30)]},
        {"n": rng.choice([0, 3, 10**9]), "seed": rng.getrandbits(63)},
        {"temperature": rng.choice([0, 1e-300, 2, -1, 5])},
        {"logit_bias": {str(rng.randrange(60000)): rng.choice([-100, 100, 101])}},
        {"stop": ["\n", "e", "", "x" * 10_000][: rng.randrange(1, 5)]},
        {"max_tokens": rng.choice([0, 1, 10**12, -5]), "min_tokens": rng.choice([0, 3, 9])},
        {"top_k": rng.choice([-1, 0, 2**80]), "top_p": rng.choice([0, 1e-9, 1]), "min_p": 1},
        {"repetition_penalty": rng.choice([1e-9, 1e9, 0]), "presence_penalty": -2},
        {"model": "../" * 100},
        {"prompt": "long " * rng.choice([10, 9_000, 60_000])},
        {"stream": True, "n": 2, "stream_options": {"include_usage": True}},
    ]


def hostile(rng: random.Random) -> tuple[str, bytes]:
    """One request: its path and its body."""
    if rng.random() < 0.2:
        return COMPLETIONS, rng.choice(JUNK)
    if rng.random() < 0.1:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        body = {"model": "demo", **chat, "response_format": rng.choice(GRAMMARS)}
        return CHAT, json.dumps(body).encode()
    body = {"model": "demo", "prompt": "a", "max_tokens": 4, **rng.choice(odd_fields(rng))}
    return COMPLETIONS, json.dumps(body).encode()


def bombard(server: LiveServer, seed: int, number: int) -> list[int]:
    """The status codes of so many hostile requests, sixteen at a time. One in ten leaves early,
    which counts as 0."""
    rng = random.Random(seed)
    requests = [(*hostile(rng), rng.random() < 0.1) for _ in range(number)]

    async def one(http: httpx.AsyncClient, at: int) -> int:
        path, body, leaves = requests[at]
        headers = {"content-type": "application/json"}
        try:
            patience = 0.05 if leaves else 120.0
            response = await http.post(path, content=body, headers=headers, timeout=patience)
        except httpx.TimeoutException:
            assert leaves
            return 0
        return response.status_code

    async def everything() -> list[int]:
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120.0) as http:
            return list(await asyncio.gather(*(one(http, at) for at in range(number))))

    return asyncio.run(everything())
