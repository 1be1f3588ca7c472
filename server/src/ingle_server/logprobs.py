"""Log-probabilities as the two endpoints show them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from ingle.request import TokenLogprob
from ingle_server.engine_client import EngineClient
from ingle_server.schemas.chat import ChatLogprobs, TokenLogprobEntry, TopLogprob
from ingle_server.schemas.completion import CompletionLogprobs
from ingle_server.schemas.sampling import PromptLogprob, PromptLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def finite(logprob: float) -> float:
    """``logprob`` as a number that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST


class TokenNamer:
    """The text of single tokens, or ``token_id:123`` for clients that ask for it."""

    def __init__(self, engine: EngineClient, *, as_ids: bool) -> None:
        self._engine = engine
        self._as_ids = as_ids

    def raw(self, token_id: int) -> bytes:
        """The token's bytes."""
        return self._engine.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        """The token's text; half a character becomes U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """The token's text, whatever the client asked for."""
        return self.raw(token_id).decode("utf-8", errors="replace")


def chat_logprobs(namer: TokenNamer, entries: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
    """``choices[i].logprobs`` of a chat; at most ``num_top`` alternatives each."""
    return ChatLogprobs(content=[_chat_entry(namer, entry, num_top) for entry in entries])


def _chat_entry(namer: TokenNamer, entry: TokenLogprob, num_top: int) -> TokenLogprobEntry:
    top = [
        TopLogprob(token=namer.name(t), logprob=finite(p), bytes=list(namer.raw(t)))
        for t, p in entry.top[:num_top]
    ]
    return TokenLogprobEntry(
        token=namer.name(entry.token_id),
        logprob=finite(entry.logprob),
        bytes=list(namer.raw(entry.token_id)),
        top_logprobs=top,
    )


def prompt_logprobs(
    namer: TokenNamer, entries: Sequence[TokenLogprob | None], num_top: int
) -> PromptLogprobs:
    """``prompt_logprobs`` of both endpoints: the likeliest ``num_top`` and the prompt's own."""
    return [None if entry is None else _by_id(namer, entry, num_top) for entry in entries]


def _by_id(namer: TokenNamer, entry: TokenLogprob, num_top: int) -> dict[str, PromptLogprob]:
    ranked = [(t, p, rank) for rank, (t, p) in enumerate(entry.top[:num_top], start=1)]
    own = (entry.token_id, entry.logprob, entry.rank)
    return {
        str(t): PromptLogprob(logprob=finite(p), rank=rank, decoded_token=namer.text(t))
        for t, p, rank in [*ranked, own]
    }


class CompletionLogprobWriter:
    """``choices[i].logprobs`` of a completion, piece by piece.

    ``text_offset`` counts whole characters: a token that ends inside one counts none of it, and the
    next token starts at the same place.
    """

    def __init__(self, namer: TokenNamer, num_top: int, echo: str) -> None:
        self._namer = namer
        self._num_top = num_top
        self._echo = echo
        self._offset = len(echo)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """The next ``entries``."""
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._namer.raw(entry.token_id)))
        return CompletionLogprobs(
            tokens=[self._namer.name(entry.token_id) for entry in entries],
            token_logprobs=[finite(entry.logprob) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def write_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """The echoed prompt's own tokens; nothing comes before the first, so it has no logprob."""
        return CompletionLogprobs(
            tokens=[self._namer.name(token_id) for token_id in token_ids],
            token_logprobs=[None if e is None else finite(e.logprob) for e in entries],
            top_logprobs=[None if e is None else self._top(e) for e in entries],
            text_offset=self._prompt_offsets(token_ids),
        )

    def _prompt_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Where each token begins in the echo. A token that is not in it (a BOS that the tokenizer
        has put there, the space before a first word) takes no room."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        offsets, at = [], 0
        for token_id in token_ids:
            offsets.append(at)
            text = decoder.decode(self._namer.raw(token_id))
            shown = next((t for t in (text, text.lstrip()) if self._echo.startswith(t, at)), "")
            at += len(shown)
        return offsets

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text. Of two tokens with the same text the likelier one is kept."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._num_top]:
            top.setdefault(self._namer.name(token_id), finite(logprob))
        top.setdefault(self._namer.name(entry.token_id), finite(entry.logprob))
        return top
