"""Finds calls in the model's text as it comes. Linear in its length; nothing is evaluated."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from ingle_server.tools.formats import ToolFormat
from ingle_server.tools.json_end import JsonEnd
from ingle_server.tools.pieces import CallArguments, CallStart, Content, Piece

_BETWEEN = re.compile(r"[\s,;\[\]]*")
_NAME_FIRST = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\[ARGS\])?(?=\{)")
_NAME_BEGUN = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\[(?:A(?:R(?:G(?:S\]?)?)?)?)?)?$")


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser:
    """Splits one answer into content and calls. What looks like a call but is none stays content.

    Args:
        form: How the model writes calls.
        names: The tools there are; where nothing marks a call, only these names make one.
        max_calls: Calls after this many are dropped.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], max_calls: int) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._state: Literal["content", "between", "object"] = "content"
        self._held = ""  # what may still become a mark
        self._raw: list[str] = []  # what was skipped or gathered since the last call
        self._name: str | None = None
        self._end = JsonEnd()
        self._num_calls = 0
        self._said_something = False
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """What has become clear with ``text``."""
        rest = self._held + text
        self._held = ""
        while rest:
            rest = getattr(self, f"_in_{self._state}")(rest)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back. A call that was cut short is content."""
        left = "".join(self._raw) + self._held
        if (
            self._state == "object"
            or (self._state == "content" and left)
            or (self._state == "between" and not self._num_calls)
        ):
            self._tell(left)
        self._held, self._raw = "", []
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell(self, text: str) -> None:
        if text:
            self._said_something = self._said_something or bool(text.strip())
            self._pieces.append(Content(text))

    def _in_content(self, text: str) -> str:
        if not self._form.starts:
            return self._in_bare_content(text)
        found = [(place, mark) for mark in self._form.starts if (place := text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._tell(text[:place])
            self._state, self._raw = "between", [mark]
            return text[place + len(mark) :]
        keep = _begun(text, self._form.starts)
        self._tell(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return ""

    def _in_bare_content(self, text: str) -> str:
        """Without marks, only an answer's beginning can be a call."""
        if self._said_something:
            self._tell(text)
            return ""
        start = text.lstrip()
        if not start or any(mark.startswith(start) for mark in self._form.ends):
            self._held = text
            return ""
        if start[0] in "{[" or start.startswith(self._form.ends):
            self._state, self._raw = "between", [text[: len(text) - len(start)]]
            return start
        self._tell(text)
        return ""

    def _in_between(self, text: str) -> str:
        match = _BETWEEN.match(text)
        skipped = match.end() if match else 0
        # A list's bracket and a mark's may be the same character.
        marks = (*self._form.starts, *self._form.ends)
        at = min((p for m in marks if (p := text.find(m, 0, skipped + len(m))) >= 0), default=-1)
        skipped = skipped if at < 0 else min(at, skipped)
        if at < 0 and len(text) - skipped < max(map(len, marks), default=0):
            skipped = min(skipped, len(text) - _begun(text, marks))
        self._raw.append(text[:skipped])
        rest = text[skipped:]
        for mark in marks:
            if rest.startswith(mark):
                self._raw.append(mark)
                return rest[len(mark) :]
        if not rest:
            return ""
        if rest[0] == "{":
            self._state, self._end = "object", JsonEnd()
            return rest
        if any(mark.startswith(rest) for mark in marks):
            self._held = rest
            return ""
        return self._name_or_content(rest)

    def _name_or_content(self, rest: str) -> str:
        if self._form.name_first:
            match = _NAME_FIRST.match(rest)
            if match:
                self._name = match[1]
                self._raw.append(match[0])
                self._state, self._end = "object", JsonEnd()
                return rest[match.end() :]
            if _NAME_BEGUN.match(rest):
                self._held = rest
                return ""
        self._to_content()
        self._said_something = True
        return rest

    def _to_content(self) -> None:
        """Goes back to content; what was skipped is shown unless it belonged to calls."""
        if not self._num_calls:
            self._tell("".join(self._raw))
        self._state, self._raw = "content", []

    def _in_object(self, text: str) -> str:
        end = self._end.feed(text)
        self._raw.append(text if end is None else text[:end])
        if end is None:
            return ""
        raw, self._raw = "".join(self._raw), []
        name, self._name = self._name, None
        call = self._call(raw[raw.index("{") :], name)
        if call is None:
            self._tell(raw)
            self._state, self._said_something = "content", True
        else:
            self._add(*call)
            self._state = "between"
        return text[end:]

    def _call(self, text: str, name: str | None) -> tuple[str, str] | None:
        """(name, arguments as JSON text), or None when it is no call."""
        value = _decoded(text)
        if not isinstance(value, dict):
            return None
        if name is None:
            name = value.get("name")
            value = value.get("arguments", value.get("parameters", {}))
        if isinstance(value, str):
            value = _decoded(value)
        if not isinstance(name, str) or not isinstance(value, dict):
            return None
        if not self._form.starts and name not in self._names:
            return None
        return name, msgspec.json.encode(value).decode()

    def _add(self, name: str, arguments: str) -> None:
        if self._num_calls < self._max_calls:
            index = self._num_calls
            self._pieces += [CallStart(index, new_call_id(), name), CallArguments(index, arguments)]
        self._num_calls += 1


class NamedCall:
    """An answer that is nothing but one call's arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Piece]:
        """The text as arguments, after the call's beginning."""
        pieces: list[Piece] = []
        if not self._begun:
            self._begun = True
            pieces.append(CallStart(0, new_call_id(), self._name))
        if text:
            pieces.append(CallArguments(0, text))
        return pieces

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of ``text`` that may be a mark's beginning."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
