"""Splits what a model thinks aloud from what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ingle_server.tools.pieces import Content, Piece, Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around a model's thoughts.

    Attributes:
        start: Before them; may be missing when the prompt already ends with it.
        end: After them.
        always: Whether an answer begins inside even when nothing says so.
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {
        "think": ReasoningFormat(),
        "qwen3": ReasoningFormat(),
        "deepseek_r1": ReasoningFormat(always=True),
    }
)


class ReasoningSplitter:
    """Finds the end of the thoughts as text comes.

    Args:
        form: The marks.
        inside: Whether the answer begins inside the thoughts.
    """

    def __init__(self, form: ReasoningFormat, inside: bool) -> None:
        self._form = form
        self._inside = inside or form.always
        self._begun = False  # whether it is clear how the answer begins
        self._trim = False  # whether blanks at the next text's start are the mark's
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """What has become clear."""
        text = self._held + text
        self._held = ""
        if not self._begun:
            text = self._begin(text)
        if not text:
            return []
        return self._inner(text) if self._inside else self._content(text)

    def finish(self) -> list[Piece]:
        """What was held back."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._inside else Content(held)]

    def _begin(self, text: str) -> str:
        start = text.lstrip()
        if self._form.start.startswith(start):
            if start != self._form.start:
                self._held = text
                return ""
        elif not start.startswith(self._form.start):
            self._begun = True
            return text
        self._begun = self._inside = self._trim = True
        return start[len(self._form.start) :]

    def _inner(self, text: str) -> list[Piece]:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        before, mark, after = text.partition(self._form.end)
        if not mark:
            keep = _end_begun(text, self._form.end)
            self._held = text[len(text) - keep :]
            before = text[: len(text) - keep]
            return [Reasoning(before)] if before else []
        self._inside, self._trim = False, True
        pieces: list[Piece] = [Reasoning(before)] if before else []
        return pieces + (self._content(after) if after else [])

    def _content(self, text: str) -> list[Piece]:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return [Content(text)] if text else []


def _end_begun(text: str, mark: str) -> int:
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
