"""Tokens to text, sequence by sequence, and what only text can show: stops and banned strings."""

from __future__ import annotations

from ingle.checkpoint.banned_strings import BannedStrings
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.held_text import HeldText
from ingle.engine.scheduler import Progress
from ingle.engine.sequence import Sequence
from ingle.engine.sequence_text import PlainText, SequenceText, TextNews
from ingle.request import CompletionOutput

MAX_AUTOMATA = 8
"""Lists of banned strings that are kept ready: clients send the same long one every time."""


class OutputProcessor:
    """Turns a step's progress into what the client gets: deltas of text and tokens.

    Args:
        tokenizer: None leaves all text empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, SequenceText] = {}
        self._automata: dict[tuple[str, ...], BannedStrings] = {}

    def open(self, sequence: Sequence) -> None:
        """Prepares for a new sequence."""
        if self._tokenizer is None:
            return
        banned = sequence.params.banned_strings
        self._texts[sequence.sequence_id] = (
            HeldText(self._tokenizer, sequence, self._automaton(banned))
            if banned
            else PlainText(self._tokenizer, sequence)
        )

    def close(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        self._texts.pop(sequence.sequence_id, None)

    def clear(self) -> None:
        """Forgets all sequences."""
        self._texts.clear()

    def process(self, progress: Progress) -> tuple[CompletionOutput, TextNews]:
        """The sequence's news for the client, and for the scheduler."""
        sequence = progress.sequence
        text = self._texts.get(sequence.sequence_id)
        if text is None or sequence.finish_reason == "error":
            news = TextNews(tokens=progress.tokens)
        else:
            news = text.news(progress)
        output = CompletionOutput(index=sequence.index, text=news.text)
        output.token_ids = [token.token_id for token in news.tokens]
        logprobs = [token.logprob for token in news.tokens if token.logprob is not None]
        if sequence.params.logprobs is not None and logprobs:
            output.logprobs = logprobs
        return output, news

    def _automaton(self, banned: tuple[str, ...]) -> BannedStrings:
        found = self._automata.pop(banned, None) or BannedStrings(banned)
        self._automata[banned] = found
        while len(self._automata) > MAX_AUTOMATA:
            del self._automata[next(iter(self._automata))]
        return found
