"""Several streams of one HTTP server at once, timed from outside."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ingle.errors import EngineDeadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and the path that streams."""

    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """When a stream's events came, in seconds of the performance counter, and its tokens.

    Attributes:
        first: The first event.
        last: The last one.
        num_tokens: Tokens asked for.
    """

    first: float
    last: float
    num_tokens: int


def stream(address: Address, body: Mapping[str, Any], num_tokens: int) -> Stamps:
    """Posts ``body`` and reads its events to the end.

    Raises:
        EngineDeadError: When the server refuses.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=300)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", address.path, json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise EngineDeadError(f"{address.path}: {answer.status} {answer.read(500)!r}")
        first = last = 0.0
        for line in answer:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
    finally:
        connection.close()
    return Stamps(first=first, last=last, num_tokens=num_tokens)


def together(
    address: Address, bodies: Sequence[Mapping[str, Any]], num_tokens: int
) -> list[Stamps]:
    """All of ``bodies`` at once."""
    gate = threading.Barrier(len(bodies))

    def one(body: Mapping[str, Any]) -> Stamps:
        gate.wait()
        return stream(address, body, num_tokens)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


def tokens_per_second(stamps: Sequence[Stamps]) -> float:
    """The streams' rates added up, each from its own first to its own last event."""
    return sum((one.num_tokens - 1) / (one.last - one.first) for one in stamps)
