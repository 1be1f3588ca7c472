"""Starts a server as a child process, asks it one question over HTTP, and ends it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence

import openai

QUESTION = "What is the capital of France?"
INSTRUCTION = "Answer in one sentence."
"""Without it the demo model is of two minds about its first word (0.1 nats apart in float32, and
another machine's bfloat16 may tip it); with it, 0.5 nats at the least."""
HOST = "127.0.0.1"
START_SECONDS = 240.0


class ServingError(Exception):
    """The server did not come up; the message holds what it printed."""


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, env: Mapping[str, str] | None = None
) -> Iterator[float]:
    """Runs ``command``; gives the seconds until /health answered; ends it when the block is left.

    Raises:
        ServingError: When it ends by itself or takes too long.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env=env
        )
        try:
            seconds = _seconds_until_ready(process, port)
            if seconds is None:
                log.seek(0)
                raise ServingError(f"The server did not come up. It said:\n{log.read()}")
            yield seconds
        finally:
            _end(process)


def _seconds_until_ready(process: subprocess.Popen[str], port: int) -> float | None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS and process.poll() is None:
        # The socket is bound before the model is loaded, so the first try may wait for an answer.
        with contextlib.suppress(OSError):
            if direct.open(f"http://{HOST}:{port}/health", timeout=5).status == 200:
                return time.monotonic() - start
        time.sleep(0.1)
    return None


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask(port: int, show: Callable[[str], None] = lambda piece: None) -> str:
    """The streamed answer to the question; ``show`` gets each piece as it comes."""
    client = openai.OpenAI(
        base_url=f"http://{HOST}:{port}/v1",
        api_key="any",
        http_client=openai.DefaultHttpxClient(trust_env=False, timeout=120),
    )
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": QUESTION},
        ],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    answer = ""
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        show(piece)
        answer += piece
    return answer


def served_answer(command: Sequence[str], port: int, env: Mapping[str, str]) -> str:
    """The answer of a server started only for this."""
    with serving(command, port, env):
        return ask(port)
