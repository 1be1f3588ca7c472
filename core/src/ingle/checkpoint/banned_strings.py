"""Finds banned strings in text that comes character by character, in any case."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

_FINAL_SIGMA: Final = str.maketrans("ς", "σ")
"""Which of the two a capital sigma becomes depends on what follows; a stream does not know yet."""


def fold(text: str) -> str:
    """``text`` in lower case, each character by itself."""
    return "".join(map(str.lower, text)).translate(_FINAL_SIGMA)


@dataclass(slots=True)
class _Node:
    """A beginning of one or more strings.

    Attributes:
        depth: Its characters.
        following: The node that each next character leads to.
        shorter: The node of the longest proper ending of this one that begins a string.
        hit: Characters of the longest string that ends here, or 0.
    """

    depth: int
    following: dict[str, int] = field(default_factory=dict)
    shorter: int = 0
    hit: int = 0


class BannedStrings:
    """An automaton over all strings at once (Aho and Corasick 1975): the cost of a character does
    not depend on how many there are. Its state is a number, so whoever reads can go back.

    Args:
        strings: What must not appear, whatever its case; none of them empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._nodes = [_Node(0)]
        for string in strings:
            self._add(fold(string))
        self._link()

    @cached_property
    def longest(self) -> int:
        """Characters of the longest string."""
        return max(node.depth for node in self._nodes)

    def step(self, state: int, character: str) -> int:
        """The state after ``character``, folded. 0 is the beginning."""
        while (found := self._nodes[state].following.get(character)) is None and state:
            state = self._nodes[state].shorter
        return found or 0

    def depth(self, state: int) -> int:
        """Characters at the end of the text that may become one of the strings."""
        return self._nodes[state].depth

    def hit(self, state: int) -> int:
        """Characters of the longest string that has just been completed, or 0."""
        return self._nodes[state].hit

    def _add(self, string: str) -> None:
        at = 0
        for character in string:
            following = self._nodes[at].following
            if character not in following:
                following[character] = len(self._nodes)
                self._nodes.append(_Node(self._nodes[at].depth + 1))
            at = following[character]
        self._nodes[at].hit = self._nodes[at].depth

    def _link(self) -> None:
        """Shorter nodes first, so that what a node falls back to is known."""
        queue = deque(self._nodes[0].following.values())
        while queue:
            at = queue.popleft()
            node = self._nodes[at]
            node.hit = node.hit or self._nodes[node.shorter].hit
            for character, child in node.following.items():
                self._nodes[child].shorter = self.step(node.shorter, character)
                queue.append(child)
