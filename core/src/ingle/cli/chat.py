"""``ingle chat``: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ingle.cli.demo_model import or_demo_model
from ingle.cli.sampling import SamplingFlags
from ingle.config import EngineConfig
from ingle.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from ingle.cli.talk import Talk

HELP: Final = "Ctrl-D ends, Ctrl-C stops an answer, /new starts over."


def chat(
    engine: EngineConfig,
    sampling: SamplingFlags,
    *,
    prompt: str | None = None,
    system: str | None = None,
) -> None:
    """Talk to a model. Without a terminal, one message is read from standard input.

    Args:
        prompt: Say this, print the answer and end.
        system: The system message.
    """
    from ingle.cli.session import Session
    from ingle.cli.talk import Talk

    interactive = prompt is None and sys.stdin.isatty()
    if prompt is None and not interactive:
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise ConfigError("standard input is empty: send a message there or use --prompt.")
    session = Session.open(or_demo_model(engine))
    talk = Talk(session, sampling, system)
    if prompt is not None:
        print_answer(talk, prompt)
    else:
        converse(talk)


def converse(talk: Talk) -> None:
    """Answers line after line until end of file."""
    print(HELP, file=sys.stderr)
    for line in typed_lines():
        if line == "/new":
            talk.start_over()
        elif line:
            try:
                print_answer(talk, line)
            except RequestError as error:
                print(f"ingle: {error} /new starts over.", file=sys.stderr)
            except KeyboardInterrupt:
                print()


def print_answer(talk: Talk, text: str) -> None:
    """Prints the answer as it comes.

    Raises:
        RequestError: When it cannot be computed.
        EngineDeadError: When it failed on the way.
    """
    with contextlib.closing(talk.answer(text)) as answer:
        for piece in answer:
            print(piece, end="", flush=True)
    print()


def typed_lines() -> Iterator[str]:
    """What the user types, until end of file."""
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
