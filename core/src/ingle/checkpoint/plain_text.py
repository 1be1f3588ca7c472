"""A tokenizer for text that must not forge control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import tokenizers
from tokenizers import AddedToken, models

_FIRST_ANCHOR: Final = 0xFDD0
"""Unicode's noncharacters from here on are "not for interchange": no text needs them."""
_FLAGS: Final = ((False, False), (True, False), (False, True), (True, True))
RESERVED_CHARACTERS: Final = "".join(chr(_FIRST_ANCHOR + n) for n in range(len(_FLAGS)))
_BREAK: Final = "\ufdd7"
_REMOVED: Final = dict.fromkeys(map(ord, RESERVED_CHARACTERS + _BREAK), "\N{REPLACEMENT CHARACTER}")


class PlainTextTokenizer:
    """Spells ``<|im_end|>`` out in pieces, as if it were any other text.

    Every added token that is not white space counts as control, because some fine-tunes forget to
    mark ``<|im_start|>`` as special. Where a real control token belongs, ``encode_pieces`` puts an
    anchor: a reserved character added as a token, replaced by the real id afterwards. So the text
    beside it is encoded as beside any added token, in one pass. There is one anchor for each way
    an added token may swallow white space (``lstrip``, ``rstrip``).

    Unigram models have control tokens among the pieces they look for: there a look-alike is broken
    after its first character, by another reserved one that leaves nothing behind.

    Args:
        backend: The model's tokenizer; left as it is.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._added = backend.get_added_tokens_decoder()
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain.add_special_tokens(
            [
                AddedToken(token.content, special=True, normalized=token.normalized)
                for token in self._added.values()
                if not token.special and token.content.strip()
            ]
        )
        self._plain.add_tokens(
            [
                AddedToken(anchor, lstrip=left, rstrip=right, normalized=False, special=False)
                for anchor, (left, right) in zip(RESERVED_CHARACTERS, _FLAGS, strict=True)
            ]
        )
        self._plain.add_tokens([AddedToken(_BREAK, normalized=False, special=False)])
        self._break = self._plain.token_to_id(_BREAK)
        self._breakable = _breakable(self._plain, (t.content for t in self._added.values()))
        self._anchors = {self._plain.token_to_id(anchor) for anchor in RESERVED_CHARACTERS}
        self._plain.encode_special_tokens = True

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; reserved characters in it become U+FFFD."""
        return self._ids(self._clean(text), add_special_tokens)

    def encode_pieces(self, pieces: Sequence[str | int], add_special_tokens: bool) -> list[int]:
        """Token ids of text pieces (str) with control tokens (int) between."""
        text = "".join(
            self._clean(piece) if isinstance(piece, str) else self._anchor(piece)
            for piece in pieces
        )
        control = (piece for piece in pieces if not isinstance(piece, str))
        ids = self._ids(text, add_special_tokens)
        return [next(control) if token_id in self._anchors else token_id for token_id in ids]

    def _clean(self, text: str) -> str:
        clean = text.translate(_REMOVED)
        return clean if self._breakable is None else self._breakable.sub(_BREAK, clean)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=add_special_tokens).ids
        return ids if self._breakable is None else [i for i in ids if i != self._break]

    def _anchor(self, token_id: int) -> str:
        token = self._added[token_id]
        return RESERVED_CHARACTERS[_FLAGS.index((token.lstrip, token.rstrip))]


def _breakable(backend: tokenizers.Tokenizer, contents: Iterable[str]) -> re.Pattern[str] | None:
    """Look-alikes that must be broken, cut after the first character; None: none need be."""
    longer = sorted((c for c in contents if len(c) > 1), key=len, reverse=True)
    if not isinstance(backend.model, models.Unigram) or not longer:
        return None
    cuts = "|".join(f"(?<={re.escape(c[0])})(?={re.escape(c[1:])})" for c in longer)
    return re.compile(cuts)
