"""Puts a typed command line into the one spelling the parser knows, and drops retired flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ingle.cli.flags import SHORT_NAMES, Command
from ingle.cli.lacking import LACKING, OFF, refusal
from ingle.cli.retired import RETIRED, SHORT_RETIRED, Retired
from ingle.errors import ConfigError

_TRUTH: Final = ("true", "false")
NOTHING: Final = "is left out: it asks for nothing that there is."
MORE_MODELS: Final = "--more-models"
"""What a second ``--model`` becomes, for the commands that serve several."""


@dataclass(slots=True)
class Arguments:
    """A command line made ready.

    Attributes:
        tokens: What the parser gets.
        config: The file after ``--config``, if any.
        notices: One line per retired flag, for the user.
    """

    tokens: list[str] = field(default_factory=list)
    config: str | None = None
    notices: list[str] = field(default_factory=list)


def prepare_arguments(command: Command, argv: Sequence[str]) -> Arguments:
    """``argv`` (what follows the subcommand) as the parser wants it.

    ``--flag false`` becomes ``--flag=false``, ``-gmu0.5`` becomes ``-gmu=0.5``; retired flags are
    taken out, renamed ones renamed; everything after a lone ``--`` is left as it is.

    Raises:
        ConfigError: For a flag or a value that cannot be ignored.
    """
    result = Arguments()
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            result.tokens += [token, *rest]
            break
        flag, value = _split(token)
        if flag == "--config" and flag in command.flags:
            result.config = value if value is not None else _next_value(rest, flag)
        elif flag == "--model" and MORE_MODELS in command.flags and _has_model(result.tokens):
            model = value if value is not None else _next_value(rest, flag)
            result.tokens.append(f"{MORE_MODELS}={model}")
        elif flag in RETIRED and flag not in command.flags:
            _retire(flag, value, rest, result)
        elif flag in LACKING and flag not in command.flags:
            _refuse(flag, value, rest, result)
        elif flag in command.switches and value is None and rest and rest[0].lower() in _TRUTH:
            result.tokens.append(f"{flag}={rest.pop(0).lower()}")
        else:
            result.tokens.append(flag if value is None else f"{flag}={value}")
    return result


def _has_model(tokens: list[str]) -> bool:
    """Whether a model was named before: by its flag, or as the first token of all."""
    flagged = any(token == "--model" or token.startswith("--model=") for token in tokens)
    return flagged or (bool(tokens) and not tokens[0].startswith("-"))


def _split(token: str) -> tuple[str, str | None]:
    """(canonical flag, value glued to it); a token that is no flag comes back as it is."""
    for short in SHORT_NAMES.values():
        glued = re.fullmatch(rf"{re.escape(short)}(\d*\.?\d+)", token)
        if glued:
            return short, glued[1]
    if not token.startswith("-") or not re.match(r"--?[A-Za-z]", token):
        return token, None
    flag, equals, value = token.partition("=")
    flag = SHORT_RETIRED.get(flag, flag)
    if flag.startswith("--"):
        flag = "--" + flag[2:].replace("_", "-")
        if flag.partition(".")[0] in (*RETIRED, *LACKING):
            flag = flag.partition(".")[0]
    if flag.startswith("--no-") and f"--{flag[5:]}" in RETIRED:
        flag = f"--{flag[5:]}"
    if flag.startswith("--no-") and f"--{flag[5:]}" in LACKING:
        return f"--{flag[5:]}", "false"
    return flag, value if equals else None


def _next_value(rest: list[str], flag: str) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{flag} needs a value after it.")
    return rest.pop(0)


def _retire(flag: str, value: str | None, rest: list[str], result: Arguments) -> None:
    entry = RETIRED[flag]
    if value is None and entry.takes_value:
        value = _next_value(rest, flag)
    elif value is None and rest and rest[0].lower() in _TRUTH:
        rest.pop(0)
    result.notices.append(_notice(flag, value, entry))
    if entry.becomes:
        result.tokens.append(entry.becomes if value is None else f"{entry.becomes}={value}")


def _refuse(flag: str, value: str | None, rest: list[str], result: Arguments) -> None:
    """Refuses a flag that asks for what Ingle lacks; one that asks for nothing is a notice."""
    if value is None and rest and not rest[0].startswith("-") and rest[0].strip().lower() in OFF:
        value = rest.pop(0)
    said = refusal(flag, value)
    if said is not None:
        raise ConfigError(said)
    result.notices.append(f"{flag} {NOTHING}")


def _notice(flag: str, value: str | None, entry: Retired) -> str:
    if entry.only and value not in entry.only:
        accepted = " or ".join(entry.only)
        raise ConfigError(f"{flag} {value} cannot be done: only {accepted}. It {entry.note}")
    return f"{flag} {entry.note}"


def settle_settings(
    command: Command, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The settings of a YAML file without the retired ones, and a notice for each of those.

    Raises:
        ConfigError: For a key that cannot be ignored.
    """
    kept: dict[str, Any] = {}
    notices: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-")
        if flag in LACKING and flag not in command.flags:
            said = refusal(flag, str(value))
            if said is not None:
                raise ConfigError(said)
            notices.append(f"{flag} {NOTHING}")
            continue
        entry = None if flag in command.flags else RETIRED.get(flag)
        if entry is None:
            kept[str(key)] = value
            continue
        notices.append(_notice(flag, str(value), entry))
        if entry.becomes:
            kept[entry.becomes.removeprefix("--")] = value
    return kept, notices
