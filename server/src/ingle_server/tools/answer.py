"""Reads one answer as it comes: thoughts first, then calls and content."""

from __future__ import annotations

from ingle_server.tools.parser import NamedCall, ToolCallParser
from ingle_server.tools.pieces import CallStart, Content, Piece
from ingle_server.tools.reasoning import ReasoningSplitter


class AnswerReader:
    """Turns text into pieces.

    Args:
        reasoning: Splits thoughts off, or None.
        tools: Finds calls in the rest, or None.
        names_calls: Whether an answer that holds calls ends with ``tool_calls``.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolCallParser | NamedCall | None,
        names_calls: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._names_calls = names_calls
        self._has_calls = False

    def push(self, text: str) -> list[Piece]:
        """What has become clear with ``text``."""
        if self._reasoning is None:
            return self._read(text)
        return self._route(self._reasoning.push(text))

    def finish(self) -> list[Piece]:
        """What was held back."""
        pieces = [] if self._reasoning is None else self._route(self._reasoning.finish())
        if self._tools is not None:
            pieces += self._noted(self._tools.finish())
        return pieces

    @property
    def ends_with_calls(self) -> bool:
        """Whether the reason for a regular end is ``tool_calls``."""
        return self._has_calls and self._names_calls

    def _route(self, pieces: list[Piece]) -> list[Piece]:
        result: list[Piece] = []
        for piece in pieces:
            result += self._read(piece.text) if isinstance(piece, Content) else [piece]
        return result

    def _read(self, text: str) -> list[Piece]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._noted(self._tools.push(text))

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self._has_calls = self._has_calls or any(isinstance(p, CallStart) for p in pieces)
        return pieces
