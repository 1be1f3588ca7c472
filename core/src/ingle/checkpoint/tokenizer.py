"""The tokenizer of a model folder, from tokenizer.json or tokenizer.model; no remote code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import tokenizers

from ingle.checkpoint.config_files import MAX_TOKENIZER_BYTES, read_optional_object
from ingle.checkpoint.plain_text import PlainTextTokenizer
from ingle.checkpoint.sentencepiece import read_sentencepiece
from ingle.checkpoint.sentencepiece_tokenizer import build_tokenizer
from ingle.checkpoint.token_bytes import TokenSpelling
from ingle.errors import CheckpointError, RequestError

_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
)


_MAX_ID: Final = 2**32 - 1
"""The largest id the library can be asked about at all."""


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    Attributes:
        path: The folder it was read from.
        config: ``tokenizer_config.json``, with what only ``special_tokens_map.json`` says.
        vocab_size: Ids in the vocabulary, added tokens included.
        special_ids: Ids of control tokens such as ``<|im_end|>``.
        bos_token_id: The token a text begins with, or None.
        eos_token_id: The token a text ends with, or None.
        chat_template: The template to use in place of the folder's own, or None.
    """

    def __init__(
        self,
        path: Path,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        chat_template: str | None = None,
    ) -> None:
        self.path = path
        self.chat_template = chat_template
        self.config = config
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """The token ids of ``text``.

        Args:
            text: Any text.
            add_special_tokens: Adds what the model puts around a text, such as BOS. As in
                transformers 5, tokenizer.json decides this alone (``add_bos_token`` does not).
            allow_special: Whether ``<|im_end|>`` and its like in the text become control tokens;
                if not, they are spelled out as ordinary text.

        Raises:
            RequestError: When ``text`` holds half of a surrogate pair, which is no character.
        """
        _check_unicode(text)
        if allow_special:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._plain.encode(text, add_special_tokens)

    def encode_pieces(
        self, pieces: Sequence[str | int], add_special_tokens: bool = False
    ) -> list[int]:
        """The token ids of plain text (str) with control tokens (int, their ids) between.

        Nothing in the text becomes a control token, and the text beside one is encoded as it
        would be beside that token in ``encode``.
        """
        for piece in pieces:
            if isinstance(piece, str):
                _check_unicode(piece)
        return self._plain.encode_pieces(pieces, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids outside the vocabulary give nothing."""
        known = [token_id for token_id in ids if 0 <= token_id <= _MAX_ID]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token (``Ġhello``), or None when there is no such id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its vocabulary spelling, or None."""
        return self._backend.token_to_id(token)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; may be part of a character. Empty for an unknown id."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        return self.spelling.to_bytes(token)

    def to_json(self) -> str:
        """The text of tokenizer.json, without truncation and padding."""
        return self._backend.to_str()

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Every added token's text and id, control tokens among them."""
        return {token.content: token_id for token_id, token in self._added.items()}

    def special_token(self, name: str) -> str | None:
        """The text of ``bos_token``, ``eos_token`` … as tokenizer_config.json gives it."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def special_token_map(self) -> dict[str, str]:
        """Every named special token that is set, as chat templates see them."""
        found = {name: self.special_token(name) for name in _NAMED_TOKENS}
        return {name: text for name, text in found.items() if text is not None}

    def _id_of(self, name: str) -> int | None:
        text = self.special_token(name)
        return None if text is None else self._backend.token_to_id(text)

    @cached_property
    def spelling(self) -> TokenSpelling:
        """How the vocabulary spells bytes."""
        return TokenSpelling.of(self._backend)

    @cached_property
    def _plain(self) -> PlainTextTokenizer:
        # The switch that spells control tokens out belongs to a whole tokenizer, so flipping it on
        # the first would change what other threads encode. Few texts need this second one.
        return PlainTextTokenizer(self._backend)


def load_tokenizer(path: Path | str, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder.

    Args:
        path: The folder.
        chat_template: A template in place of the folder's own.

    Raises:
        CheckpointError: When neither tokenizer.json nor tokenizer.model is there (with a remedy),
            or one is damaged or too large.
    """
    folder = Path(path)
    config = {
        **read_optional_object(folder / "special_tokens_map.json", MAX_TOKENIZER_BYTES),
        **read_optional_object(folder / "tokenizer_config.json", MAX_TOKENIZER_BYTES),
    }
    backend = _backend(folder, config)
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(folder, backend, config, chat_template)


def _backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """From tokenizer.json, else from SentencePiece's tokenizer.model."""
    file, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    if not file.is_file() and pieces.is_file():
        model = read_sentencepiece(pieces)
        with _DamageNamed(pieces):
            return build_tokenizer(model, config)
    if not file.is_file():
        raise CheckpointError(_missing(folder))
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{file} has more than {MAX_TOKENIZER_BYTES} bytes.")
    with _DamageNamed(file):
        return tokenizers.Tokenizer.from_file(str(file))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds half of a surrogate pair (\\u{ord(text[error.start]):04x}) at "
            f"character {error.start}; send valid Unicode."
        ) from None


class _DamageNamed:
    """Turns what ``tokenizers`` raises for every kind of damage, which is ``Exception`` itself and
    no subclass of it, into ``CheckpointError`` naming the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is Exception:
            raise CheckpointError(f"{self._file} is damaged: {str(error)[:200]}.") from error


def _missing(folder: Path) -> str:
    if (folder / "vocab.json").is_file():
        return (
            f'{folder} has no tokenizer.json. Make it once: python -c "from transformers import '
            f"AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return (
        f"{folder} has no tokenizer.json. Download it with the model, or name the tokenizer's "
        "folder with --tokenizer."
    )
