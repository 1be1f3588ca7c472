"""Puts the subcommands together, runs one, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cyclopts import App, CycloptsError, UnusedCliTokensError
from cyclopts.config import Dict, Env

from ingle import __version__
from ingle.cli.arguments import prepare_arguments, settle_settings
from ingle.cli.commands import find_command, find_commands
from ingle.cli.flags import Command
from ingle.cli.settings_file import read_settings
from ingle.errors import ConfigError, IngleError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

ONEDNN_PROGRAMS: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "48")
"""oneDNN (torch's products on a CPU) keeps so many programs, one to a shape, at 0.57 MB each: eight
row counts of a model, and 27 MB. Its own bound is 1,024. It reads this once, at its first product.
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Runs ``argv`` and gives the exit code: 0, 1 for a failure, 2 for wrong usage."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(*ONEDNN_PROGRAMS)
    try:
        return _run(tokens)
    except UnusedCliTokensError as error:
        extra = " ".join(error.unused_tokens or ())
        return _complain(f"{extra!r} is left over. Quote a text that has spaces.", USAGE)
    except CycloptsError as error:
        return _complain(_one_line(str(error)), USAGE)
    except ConfigError as error:
        return _complain(str(error), USAGE)
    except IngleError as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`ingle plugins | head`); nothing more to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a full disk, a folder that may not be written
        if error.strerror is None:
            raise
        named = f": {error.filename}" if error.filename else ""
        return _complain(f"{error.strerror}{named}.", FAILED)


def _run(tokens: list[str]) -> int:
    name = tokens[0] if tokens and not tokens[0].startswith("-") else ""
    command = find_command(name, tokens[1:]) if name else None
    if command is None:
        result = build_app(find_commands())(tokens, exit_on_error=False, print_error=False)
    else:
        result = _run_command(command, tokens[1:])
    return result if isinstance(result, int) else OK


def _run_command(command: Command, argv: Sequence[str]) -> Any:
    arguments = prepare_arguments(command, argv)
    config = arguments.config
    if config is None and "--config" in command.flags:
        config = os.environ.get("INGLE_CONFIG")
    settings, notices = settle_settings(command, read_settings(config) if config else {})
    for notice in (*arguments.notices, *notices):
        print(f"ingle: {notice}", file=sys.stderr)
    app = build_app([command], settings=settings, source=config or "")
    return app([command.name, *arguments.tokens], exit_on_error=False, print_error=False)


def build_app(
    commands: Sequence[Command], settings: Mapping[str, Any] | None = None, source: str = ""
) -> App:
    """The cyclopts application of ``commands``.

    Precedence: flags, then ``INGLE_...`` variables, then ``settings`` (a YAML file's, read from
    ``source``), then the dataclasses' defaults.
    """
    app = App(
        name="ingle",
        version=__version__,
        help="An LLM inference engine for the card you own, where formats are plugins.",
        help_format="markdown",
        help_epilogue="Every flag is also an environment variable: `--max-model-len` is "
        "`INGLE_MAX_MODEL_LEN`. `ingle SUBCOMMAND --help` lists the flags of a subcommand.",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.config = (
        Env("INGLE_", command=False, show=False),
        Dict(dict(settings or {}), use_commands_as_keys=False, source=source),
    )
    for command in commands:
        app.command(command.call, name=command.name)
    return app


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _complain(message: str, code: int) -> int:
    print(f"ingle: {message}", file=sys.stderr)
    return code
