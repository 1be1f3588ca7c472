"""Log-probabilities as the two endpoints show them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from ingle.request import TokenLogprob
from ingle_server.engine_client import EngineClient
from ingle_server.schemas.chat import ChatLogprobs, TokenLogprobEntry, TopLogprob
from ingle_server.schemas.completion import CompletionLogprobs

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
        if self._as_ids:
            return f"token_id:{token_id}"
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


class CompletionLogprobWriter:
    """``choices[i].logprobs`` of a completion, piece by piece.

    ``text_offset`` counts whole characters: a token that ends inside one counts none of it, and the
    next token starts at the same place.
    """

    def __init__(self, namer: TokenNamer, num_top: int, num_echoed: int) -> None:
        self._namer = namer
        self._num_top = num_top
        self._offset = num_echoed
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

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text. Of two tokens with the same text the likelier one is kept."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._num_top]:
            top.setdefault(self._namer.name(token_id), finite(logprob))
        top.setdefault(self._namer.name(entry.token_id), finite(entry.logprob))
        return top
