"""Finds where a JSON object ends in text that comes in pieces, in linear time."""

from __future__ import annotations

import re

_NEXT = {
    False: re.compile(r'["{}]'),  # outside a string
    True: re.compile(r'["\\]'),  # inside
}


class JsonEnd:
    """Follows one object from its ``{``. It looks at braces and strings, and trusts the rest."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The place in ``text`` just after the object, or None while it goes on."""
        place = 0
        if self._escaped and text:
            self._escaped, place = False, 1
        while (match := _NEXT[self._in_string].search(text, place)) is not None:
            place = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif match[0] == "\\":
                self._escaped = place == len(text)
                place += 1
            elif self._close(match[0]):
                return place
        return None

    def _close(self, brace: str) -> bool:
        self._depth += 1 if brace == "{" else -1
        return self._depth == 0
