"""The text of a sequence with banned strings: tokens come out once they can't be taken back.

A banned string that has been completed sends the sequence back to the token in which it began
(TabbyAPI's ``banned_strings``). So a token is held back while its text may still become one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from ingle.checkpoint.banned_strings import BannedStrings, fold
from ingle.checkpoint.detokenizer import IncrementalDetokenizer, StopStrings
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.scheduler import Progress
from ingle.engine.sequence import Sequence
from ingle.engine.sequence_text import RollBack, TextNews, hides_last
from ingle.engine.step import SampledToken
from ingle.engine.token_places import TokenPlaces
from ingle.request import SamplingParams

MIN_ROLL_BACKS = 256
ROLL_BACKS_PER_TOKEN = 4
"""A sequence may go back so often in all; then it ends before the string it can't avoid."""


def max_roll_backs(max_tokens: int) -> int:
    """How often a sequence of at most ``max_tokens`` may go back."""
    return MIN_ROLL_BACKS + ROLL_BACKS_PER_TOKEN * max_tokens


@dataclass(slots=True, kw_only=True)
class _Reading:
    """How far the text has been read; ``copy`` makes it possible to go back.

    Attributes:
        params: The request's.
        spelling: The tokenizer, for the bytes of tokens.
        banned: What to look for.
        detokenizer: Makes tokens text.
        stops: Looks for stop strings.
        places: In which tokens the characters begin.
        begins: The same of the last characters read, in lower case.
        state: The automaton's.
        stop_string: The stop string found.
        banned_at: The number of the token in which the banned string found begins.
    """

    params: SamplingParams
    spelling: Tokenizer
    banned: BannedStrings
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    places: TokenPlaces
    begins: deque[int]
    state: int = 0
    stop_string: str | None = None
    banned_at: int | None = None

    def copy(self) -> _Reading:
        """The same, to go on from separately."""
        return replace(
            self,
            detokenizer=self.detokenizer.copy(),
            stops=self.stops.copy(),
            places=self.places.copy(),
            begins=self.begins.copy(),
        )

    def push(self, number: int, token_id: int) -> str:
        """The text that no stop string can take away any more, with the token ``number``."""
        if not self.detokenizer.skips(token_id):
            self.places.push(number, self.spelling.id_to_bytes(token_id))
        return self._read(self.detokenizer.push(token_id), number + 1)

    def finish(self, num_tokens: int) -> str:
        """What was held back in half characters and half stop strings."""
        text = self._read(self.detokenizer.finish(), num_tokens)
        is_over = self.stop_string is not None or self.banned_at is not None
        return text if is_over else text + self.stops.finish()

    @property
    def held_from(self) -> int | None:
        """The first token that may still be taken back."""
        places = [] if self.places.pending is None else [self.places.pending]
        depth = self.banned.depth(self.state)
        return min([*places, *([self.begins[-depth]] if depth else [])], default=None)

    def _read(self, text: str, num_tokens: int) -> str:
        """Both kinds of string character by character: the first to end counts."""
        out = ""
        for character in text:
            if self._bans(character):
                break
            if num_tokens < self.params.min_tokens:
                out += character
                continue
            certain, self.stop_string = self.stops.push(character)
            out += certain
            if self.stop_string is not None:
                break
        return out

    def _bans(self, character: str) -> bool:
        """Whether the character completes a banned string."""
        place = self.places.begin(character)
        for folded in fold(character):
            self.begins.append(place)
            self.state = self.banned.step(self.state, folded)
            if length := self.banned.hit(self.state):
                self.banned_at = self.begins[-length]
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Held:
    """A token that has not come out: its text, and how things stood before it."""

    token: SampledToken
    text: str
    before: _Reading


class HeldText:
    """One sequence's text.

    Args:
        tokenizer: The model's.
        sequence: Whose text.
        banned: Its banned strings.
    """

    def __init__(self, tokenizer: Tokenizer, sequence: Sequence, banned: BannedStrings) -> None:
        params = sequence.params
        self._reading = _Reading(
            params=params,
            spelling=tokenizer,
            banned=banned,
            detokenizer=IncrementalDetokenizer(
                tokenizer, sequence.prompt_token_ids, params.skip_special_tokens
            ),
            stops=StopStrings(params.stop, params.include_stop_str_in_output),
            places=TokenPlaces(),
            begins=deque(maxlen=banned.longest),
        )
        self._held: deque[_Held] = deque()
        self._num_read = 0
        self._roll_backs_left = max_roll_backs(sequence.max_tokens)

    def news(self, progress: Progress) -> TextNews:
        """What can't be taken back any more, and where the sequence must go on from."""
        tokens = progress.tokens
        for at, token in enumerate(tokens, start=1):
            self._read(token, hidden=at == len(tokens) and hides_last(progress))
            if self._reading.banned_at is not None:
                return self._go_back(self._reading.banned_at, len(tokens) - at)
            if self._reading.stop_string is not None:
                news = self._release(None)
                stop = self._reading.stop_string
                return replace(news, stop_string=stop, num_dropped=len(tokens) - at)
        if not progress.sequence.finished:
            return self._release(self._reading.held_from)
        return self._finish(progress.sequence)

    def _read(self, token: SampledToken, hidden: bool) -> None:
        before = self._reading.copy()
        text = "" if hidden else self._reading.push(self._num_read, token.token_id)
        self._held.append(_Held(token, text, before))
        self._num_read += 1

    def _finish(self, sequence: Sequence) -> TextNews:
        text = self._reading.finish(self._num_read)
        if self._reading.banned_at is None:
            news = self._release(None)
            return replace(news, text=news.text + text, stop_string=self._reading.stop_string)
        if sequence.finish_reason == "abort":
            return TextNews()  # nobody goes on, and what was held is nobody's
        return self._go_back(self._reading.banned_at, 0)

    def _go_back(self, number: int, num_dropped: int) -> TextNews:
        """Forgets the tokens from ``number`` on."""
        at = number - (self._num_read - len(self._held))
        entry, num_taken = self._held[at], len(self._held) - at
        self._reading, self._num_read = entry.before, number
        for _ in range(num_taken):
            self._held.pop()
        self._roll_backs_left -= 1
        if self._roll_backs_left < 0:
            news = self._release(None)
            return replace(news, gave_up=True, num_dropped=num_taken + num_dropped)
        back = RollBack(num_output=number, token_id=entry.token.token_id)
        return replace(self._release(self._reading.held_from), roll_back=back)

    def _release(self, held_from: int | None) -> TextNews:
        """Lets tokens out, up to ``held_from``."""
        first = self._num_read - len(self._held)
        count = len(self._held) if held_from is None else held_from - first
        out = [self._held.popleft() for _ in range(count)]
        text = "".join(held.text for held in out)
        return TextNews(text=text, tokens=tuple(held.token for held in out))
