"""Reads ``tokenizer.model``, SentencePiece's own file, for folders without tokenizer.json.

Layout: ``sentencepiece_model.proto`` of google/sentencepiece in Protocol Buffers' wire format:
fields as (number << 3 | kind), kinds 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from ingle.checkpoint.config_files import MAX_TOKENIZER_BYTES
from ingle.errors import CheckpointError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4
_BPE: Final = 2
_UNIGRAM: Final = 1


class PieceType(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its place is its id."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """A parsed file.

    Attributes:
        pieces: The vocabulary.
        is_bpe: Merges pairs by score; else it looks for the likeliest pieces (unigram).
        byte_fallback: Characters without a piece become byte pieces.
        charsmap: Compiled normalisation of characters, or empty.
        add_dummy_prefix: A space goes before every text.
        remove_extra_whitespaces: Runs of spaces become one, and none stays at the ends.
    """

    pieces: tuple[Piece, ...]
    is_bpe: bool
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The model in ``path``.

    Raises:
        CheckpointError: When it is damaged, too large, or of a kind Ingle does not know.
    """
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_TOKENIZER_BYTES} bytes.")
    try:
        return _model(path.read_bytes())
    except (IndexError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is no SentencePiece model: {str(error)[:100]}.") from error


def _model(data: bytes) -> SentencePieceModel:
    pieces = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(_piece(_as_bytes(value)))
        elif number == _TRAINER:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(_as_bytes(value)))
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if not pieces or kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"{len(pieces)} pieces, model type {kind!r} (1 or 2 is read)")
    return SentencePieceModel(
        pieces=tuple(pieces),
        is_bpe=kind == _BPE,
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        charsmap=_as_bytes(normalizer.get(_CHARSMAP, b"")),
        add_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_SPACES, 1)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _as_bytes(fields.get(2, b"\0\0\0\0")))
    kind = fields.get(3, PieceType.NORMAL)
    return Piece(_as_bytes(fields[1]).decode(), score, PieceType(kind))  # type: ignore[arg-type]


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field of a message; numbers as int, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"field of kind {kind}")
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number without an end")
