"""What a piece of the model's text turned out to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number ``index`` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; joined, they are JSON."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments
