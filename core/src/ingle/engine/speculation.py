"""Speculation as the scheduler sees it: who guesses, and what came of it. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Drafter(Protocol):
    """Guesses how one sequence goes on. A wrong guess costs time and never an answer."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        """At most ``limit`` tokens that may follow ``token_ids``."""
        ...

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Says how many tokens of the last guess were right."""
        ...

    def close(self) -> None:
        """Gives back what it holds; the sequence has ended."""
        ...


@dataclass(slots=True, kw_only=True)
class Speculation:
    """How an engine speculates, and what it has gained.

    Attributes:
        drafter: Makes a drafter for a new sequence.
        num_tokens: Tokens guessed at most in a step, per sequence.
        num_drafts: Guesses computed.
        num_draft_tokens: Tokens in them.
        num_accepted_tokens: Of these, the ones that were right.
    """

    drafter: Callable[[], Drafter]
    num_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a guess."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
