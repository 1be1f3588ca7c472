"""Tokens to text, sequence by sequence, and the stop strings that only text can show."""

from __future__ import annotations

from ingle.checkpoint.detokenizer import IncrementalDetokenizer, StopStrings
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.scheduler import Progress
from ingle.engine.sequence import Sequence
from ingle.request import CompletionOutput


class SequenceText:
    """The text of one sequence as it grows.

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

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token. Sets ``stop_string`` on a hit."""
        self._num_tokens += 1
        return self._filter(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The text that was held back. Sets ``stop_string`` on a hit."""
        text = self._filter(self._detokenizer.finish())
        return text if self.stop_string is not None else text + self._stop_strings.finish()

    def _filter(self, text: str) -> str:
        # Before min_tokens nothing may stop the sequence, so nothing is looked for.
        if self._num_tokens < self._min_tokens:
            return text
        text, self.stop_string = self._stop_strings.push(text)
        return text


class OutputProcessor:
    """Turns a step's progress into what the client gets: deltas of text and tokens.

    Args:
        tokenizer: None leaves all text empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, SequenceText] = {}

    def open(self, sequence: Sequence) -> None:
        """Prepares for a new sequence."""
        if self._tokenizer is not None:
            self._texts[sequence.sequence_id] = SequenceText(self._tokenizer, sequence)

    def close(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        self._texts.pop(sequence.sequence_id, None)

    def clear(self) -> None:
        """Forgets all sequences."""
        self._texts.clear()

    def process(self, progress: Progress) -> tuple[CompletionOutput, str | None]:
        """The sequence's news, and the stop string that has just ended its text, if one did."""
        sequence, tokens = progress.sequence, progress.tokens
        output = CompletionOutput(index=sequence.index)
        text = self._texts.get(sequence.sequence_id)
        stop_string = None
        if text is not None and sequence.finish_reason != "error":
            output.text, num_used = _new_text(text, progress)
            tokens, stop_string = tokens[:num_used], text.stop_string
        output.token_ids = [token.token_id for token in tokens]
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        if sequence.params.logprobs is not None and logprobs:
            output.logprobs = logprobs
        return output, stop_string


def _new_text(text: SequenceText, progress: Progress) -> tuple[str, int]:
    """What a sequence's news adds to its text, and how many of the tokens do: a stop string ends
    it wherever it comes. A token that stops it is no part of the text."""
    sequence, new = progress.sequence, ""
    hidden = sequence.finish_reason == "stop" and not sequence.params.include_stop_str_in_output
    tokens = progress.tokens
    for at, token in enumerate(tokens, start=1):
        if not hidden or at < len(tokens):
            new += text.push(token.token_id)
        if text.stop_string is not None:
            return new, at
    if sequence.finished:
        new += text.finish()
    return new, len(tokens)
