"""Tells control tokens that a template wrote from their look-alikes in what users wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_OPEN: Final = "\ufdd4"
_CLOSE: Final = "\ufdd5"
_MARKS: Final = dict.fromkeys(map(ord, _OPEN + _CLOSE), "\N{REPLACEMENT CHARACTER}")


class ControlMarks:
    """Marks look-alikes before rendering and takes the rendered text apart afterwards.

    The look-alike stays readable between its marks, so a template may still search for it or split
    at it; a mark left alone by that only separates.

    Args:
        tokens: Text and id of every token that could be a control token.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        either = _alternatives(tokens)
        self._pieces = re.compile(f"{_OPEN}({either}){_CLOSE}|({either})|[{_OPEN}{_CLOSE}]")

    def marking(self, tokens: Iterable[str]) -> re.Pattern[str]:
        """What ``mark`` looks for, to mark ``tokens`` only."""
        return re.compile(_alternatives(tokens))

    def mark(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """A copy of JSON data with every match of ``pattern`` in its strings marked."""
        if isinstance(value, str):
            return pattern.sub(f"{_OPEN}\\g<0>{_CLOSE}", value.translate(_MARKS))
        if isinstance(value, Mapping):
            return {self.mark(k, pattern): self.mark(v, pattern) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, pattern) for item in value]
        return value

    def marked(self, rendered: str) -> bool:
        """Whether ``rendered`` holds any mark."""
        return _OPEN in rendered or _CLOSE in rendered

    def pieces(self, rendered: str) -> Iterator[str | int]:
        """Plain text (str) and the template's own control tokens (int, ids), in order."""
        text: list[str] = []
        end = 0
        for match in self._pieces.finditer(rendered):
            text.append(rendered[end : match.start()])
            end = match.end()
            if match[1] is not None:
                text.append(match[1])
            elif match[2] is not None:
                yield "".join(text)
                yield self._tokens[match[2]]
                text = []
        yield "".join([*text, rendered[end:]])


def _alternatives(tokens: Iterable[str]) -> str:
    """A pattern that matches any of ``tokens``, longest first; without tokens, nothing."""
    return "|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or "(?!)"
