"""Tokens to text one at a time, so that text never ends in half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final, Protocol

from ingle.checkpoint.stop_strings import StopStrings
from ingle.checkpoint.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopStrings"]

_CONTEXT_TOKENS: Final = 8
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of one sequence, as its tokens come.

    The texts returned, joined, are what decoding prompt and output together adds to the prompt's
    own text. A character begun in the prompt and completed by the output belongs to the output; a
    piece of one that is never completed stays the prompt's.

    Args:
        tokenizer: The model's.
        prompt_token_ids: The prompt: it decides about a leading space.
        skip_special_tokens: Leaves control tokens out.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        prompt = _context(tokenizer, prompt_token_ids, self._skipped)
        pure = tokenizer.spelling.pure
        self._stream: _Stream = (ByteStream if pure else WindowStream)(tokenizer, prompt)

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often all of it, perhaps none."""
        return "" if self.skips(token_id) else self._stream.push(token_id)

    def skips(self, token_id: int) -> bool:
        """Whether the token is left out of the text."""
        return token_id in self._skipped

    def copy(self) -> IncrementalDetokenizer:
        """The same, to go on from separately."""
        twin = IncrementalDetokenizer.__new__(IncrementalDetokenizer)
        twin._skipped, twin._stream = self._skipped, self._stream.copy()
        return twin

    def finish(self) -> str:
        """What was held back, with U+FFFD for what never became a character."""
        return self._stream.finish()


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...

    def copy(self) -> _Stream: ...


class ByteStream:
    """For byte-level vocabularies: text is the tokens' bytes as UTF-8."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt:
            self._decoder.decode(self._bytes(token_id))
        self._continues_prompt = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """The characters that this token's bytes complete."""
        return self._own(self._decoder.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """One U+FFFD when bytes of a character are left."""
        return self._own(self._decoder.decode(b"", final=True))

    def copy(self) -> ByteStream:
        """The same, to go on from separately."""
        twin = ByteStream(self._tokenizer, [])
        twin._decoder.setstate(self._decoder.getstate())
        twin._continues_prompt = self._continues_prompt
        return twin

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._tokenizer.spelling.to_bytes(token)

    def _own(self, text: str) -> str:
        """``text`` without the mark for a character that broke off in the prompt."""
        if not self._continues_prompt or not text:
            return text
        self._continues_prompt = False
        return text.removeprefix(_BROKEN)


class WindowStream:
    """For every other vocabulary: decodes a short window with and without the new tokens.

    The window starts at tokens whose text is out already, so what depends on neighbours, such as a
    dropped leading space, comes out as in one go. Byte-fallback tokens wait for the end of their
    run, because the decoder takes or rejects a run as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = prompt
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text of this token and of those that waited for it."""
        self._pending.append(token_id)
        if _is_single_byte(self._tokenizer, token_id):
            return ""
        return self._advance(final=False)

    def finish(self) -> str:
        """The text of the tokens that still wait."""
        return self._advance(final=True) if self._pending else ""

    def copy(self) -> WindowStream:
        """The same, to go on from separately."""
        twin = WindowStream(self._tokenizer, self._shown)
        twin._pending = self._pending.copy()
        return twin

    def _advance(self, final: bool) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=False)
        after = self._tokenizer.decode(self._shown + self._pending, skip_special_tokens=False)
        if not after.startswith(before):  # the prompt ended inside a character, now complete
            before = _common_start(before, after)
        text = after[len(before) :]
        if not text or (text.endswith(_BROKEN) and not final and self._may_complete):
            return ""
        # Tokens that give text of their own are context enough for the next ones.
        self._shown, self._pending = self._pending[-_CONTEXT_TOKENS:], []
        return text

    @property
    def _may_complete(self) -> bool:
        """Whether a broken character at the end can still become a whole one."""
        return self._tokenizer.spelling.kind == "byte_level"


def _common_start(one: str, other: str) -> str:
    """The longest text both begin with."""
    length = next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return one[:length]


def _context(tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> list[int]:
    """The last few tokens of ``prompt`` that are not skipped: all that later text depends on.
    A run of byte-fallback tokens is never cut."""
    kept: list[int] = []
    for token_id in reversed(prompt):
        if token_id not in skipped:
            if len(kept) >= _CONTEXT_TOKENS and not _is_single_byte(tokenizer, kept[-1]):
                break
            kept.append(token_id)
    return kept[::-1]


def _is_single_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    token = tokenizer.id_to_token(token_id)
    return token is not None and tokenizer.spelling.is_single_byte(token)
