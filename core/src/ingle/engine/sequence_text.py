"""The text of one sequence as it grows, and what ends or takes back parts of it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ingle.checkpoint.detokenizer import IncrementalDetokenizer, StopStrings
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.scheduler import Progress
from ingle.engine.sequence import Sequence
from ingle.engine.step import SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """A banned string was completed.

    Attributes:
        num_output: Output tokens before the one in which it began; these stay.
        token_id: That one, barred from now on at its place.
    """

    num_output: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNews:
    """What a step has added to a sequence's text.

    Attributes:
        text: The new text.
        tokens: The tokens that are news with it.
        stop_string: What has ended the text, if a string did.
        gave_up: Whether the text ends because no banned string could be avoided.
        num_dropped: Tokens drawn behind that end, which are no part of the answer.
        roll_back: Where the sequence has to go on instead.
    """

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    stop_string: str | None = None
    gave_up: bool = False
    num_dropped: int = 0
    roll_back: RollBack | None = None


class SequenceText(Protocol):
    """Makes a sequence's tokens text."""

    def news(self, progress: Progress) -> TextNews:
        """What the sequence's progress adds. Its end lets out everything held back."""
        ...


class PlainText:
    """Text as it comes, up to a stop string.

    Text comes out only at safe character borders, and what could become a stop string is held
    back until it is clear.
    """

    def __init__(self, tokenizer: Tokenizer, sequence: Sequence) -> None:
        params = sequence.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, sequence.prompt_token_ids, params.skip_special_tokens
        )
        self._stop_strings = StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.stop_string: str | None = None

    def news(self, progress: Progress) -> TextNews:
        """What the sequence's progress adds: a stop string ends it wherever it comes."""
        text, num_used = self._new_text(progress)
        return TextNews(
            text=text,
            tokens=progress.tokens[:num_used],
            stop_string=self.stop_string,
            num_dropped=len(progress.tokens) - num_used,
        )

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token. Sets ``stop_string`` on a hit."""
        self._num_tokens += 1
        return self._filter(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The text that was held back. Sets ``stop_string`` on a hit."""
        text = self._filter(self._detokenizer.finish())
        return text if self.stop_string is not None else text + self._stop_strings.finish()

    def _new_text(self, progress: Progress) -> tuple[str, int]:
        """New text, and how many of the tokens it is made of. A token that stops the sequence is
        no part of the text."""
        new, tokens = "", progress.tokens
        for at, token in enumerate(tokens, start=1):
            if not (at == len(tokens) and hides_last(progress)):
                new += self.push(token.token_id)
            if self.stop_string is not None:
                return new, at
        if progress.sequence.finished:
            new += self.finish()
        return new, len(tokens)

    def _filter(self, text: str) -> str:
        # Before min_tokens nothing may stop the sequence, so nothing is looked for.
        if self._num_tokens < self._min_tokens:
            return text
        text, self.stop_string = self._stop_strings.push(text)
        return text


def hides_last(progress: Progress) -> bool:
    """Whether the last token has ended the sequence and is no part of the text."""
    sequence = progress.sequence
    return sequence.finish_reason == "stop" and not sequence.params.include_stop_str_in_output
