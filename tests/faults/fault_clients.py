"""Clients whose requests are under way while something happens to the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from live_server import LiveServer

PATIENCE = 60.0
PATH = "/v1/completions"


def completion(**fields: Any) -> dict[str, Any]:
    """A body for ``PATH``; long, unless ``fields`` says otherwise."""
    long = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    return {"model": "demo", "prompt": "Once upon a time", **long, **fields}


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Returns as soon as ``condition`` holds, and fails when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


class Client:
    """A request in a thread of its own.

    Attributes:
        status: The answer's status, None before there is one.
        text: What has come so far.
        error: Why nothing more will come, when the connection broke.
    """

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        self.status: int | None = None
        self.text = ""
        self.error: httpx.HTTPError | None = None
        self._url = server.url + PATH
        self._body = completion(**fields)
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE) as response:
                self.status = response.status_code
                for piece in response.iter_text():
                    self.text += piece
        except httpx.HTTPError as error:
            self.error = error

    def join(self) -> Client:
        """Waits for the end."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self

    def has_begun(self) -> bool:
        """Whether text has come (of a stream)."""
        return self.text.count("data: ") > 1

    def events(self) -> list[dict[str, Any]]:
        """A stream's events; checks that it ended as streams end."""
        *blocks, done, rest = self.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        blocks = [block for block in blocks if not block.startswith(":")]
        return [json.loads(block.removeprefix("data: ")) for block in blocks]

    def num_tokens(self) -> int:
        """Tokens of a stream with ``logprobs``."""
        choices = [choice for event in self.events() for choice in event.get("choices", ())]
        return sum(len(c["logprobs"]["tokens"]) for c in choices if c.get("logprobs"))


def check_told(streamed: Client, plain: Client, status: int) -> tuple[str, str]:
    """Both have heard of a failure as clients expect it; gives the two messages."""
    last = streamed.join().events()[-1]
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert plain.join().status == status, (plain.text, plain.error)
    error = json.loads(plain.text)["error"]
    assert error["type"] == last["error"]["type"] == "server_error"
    for message in (error["message"], last["error"]["message"]):
        assert "0x" not in message
        assert "Traceback" not in message
    return last["error"]["message"], error["message"]
