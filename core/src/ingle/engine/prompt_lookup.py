"""Guesses what comes next from what came before: prompt lookup. No torch here.

A text that copies repeats its own tokens: where its last tokens stood before, what followed them
then is likely to follow now (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PLACES = 4
"""Latest places of an n-gram that are compared; older ones are seldom better."""
FEW = 2
"""A draft that gains fewer tokens than this did not pay for its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """How prompt lookup guesses.

    Attributes:
        shortest: Tokens at least that must have stood there before.
        longest: Tokens compared at most.
        num_tokens: Tokens guessed at most.
    """

    shortest: int
    longest: int
    num_tokens: int


class PromptLookup:
    """One sequence's guesses.

    As many tokens are guessed as the match is long: what was copied so far says how much more
    will be. After a guess that did not pay a longer match is asked for, so that free text soon
    costs nothing; after one that did, a shorter one again.
    """

    def __init__(self, limits: LookupLimits) -> None:
        self._limits = limits
        self._required = limits.shortest
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_seen = 0

    def propose(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        """At most ``limit`` tokens that may follow ``token_ids``, which only ever grows."""
        size = self._limits.shortest
        self._see(token_ids)
        if limit < 1 or len(token_ids) <= size:
            return ()
        best, length = 0, 0
        for place in self._places.get(tuple(token_ids[-size:]), ()):
            found = self._match(token_ids, place)
            if found >= length:
                best, length = place, found
        if length < self._required:
            return ()
        return token_ids[best : best + min(limit, length, self._limits.num_tokens)]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Says what came of the last guess."""
        if num_accepted == num_drafted:
            self._required = max(self._limits.shortest, self._required // 2)
        elif num_accepted < FEW:
            self._required = min(self._limits.longest, self._required * 2)

    def close(self) -> None:
        """Nothing is held that has to be given back."""

    def _see(self, token_ids: Sequence[int]) -> None:
        """Notes where each n-gram ends, all but the one at the very end."""
        size = self._limits.shortest
        for end in range(max(self._num_seen + 1, size), len(token_ids)):
            places = self._places.setdefault(tuple(token_ids[end - size : end]), [])
            places.append(end)
            del places[:-MAX_PLACES]
        self._num_seen = max(self._num_seen, len(token_ids) - 1)

    def _match(self, token_ids: Sequence[int], place: int) -> int:
        """How many of the last tokens also stand before ``place``."""
        length, most = self._limits.shortest, min(self._limits.longest, place)
        while length < most and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length
