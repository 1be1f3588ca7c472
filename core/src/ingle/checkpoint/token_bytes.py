"""The bytes behind a vocabulary entry: ``Ġcaf`` is `` caf``, ``<0xC3>`` is one byte."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import tokenizers

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: each character's byte. Printable Latin-1 stands for itself, the other
    bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_LEVEL_ALPHABET: Final[Mapping[str, int]] = MappingProxyType(_byte_level_alphabet())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpelling:
    """How a vocabulary spells bytes.

    Attributes:
        kind: ``byte_level``: every byte is one printable character (GPT-2's table);
            ``metaspace``: ``space`` stands for a space and ``<0xC3>`` for a byte; ``plain``.
        space: The character that stands for a space.
        pure: Whether the decoder does nothing else: text is the tokens' bytes, joined, as UTF-8.
    """

    kind: Literal["byte_level", "metaspace", "plain"]
    space: str = "▁"
    pure: bool = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenSpelling:
        """The spelling that the tokenizer's decoder undoes."""
        decoder = backend.decoder
        steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds:
            return cls(kind="byte_level", pure=kinds == ["ByteLevel"])
        for step in steps:
            if step.get("type") == "Metaspace":
                return cls(kind="metaspace", space=step.get("replacement", "▁"))
        if "ByteFallback" in kinds or "Replace" in kinds:
            return cls(kind="metaspace")
        return cls(kind="plain")

    def to_bytes(self, token: str) -> bytes:
        """The bytes that vocabulary entry ``token`` stands for."""
        if self.kind == "byte_level":
            try:
                return bytes([BYTE_LEVEL_ALPHABET[character] for character in token])
            except KeyError:  # an added token with characters of its own
                return token.encode()
        if self.kind == "metaspace":
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                return bytes([int(match[1], 16)])
            return token.replace(self.space, " ").encode()
        return token.encode()

    def is_single_byte(self, token: str) -> bool:
        """Whether ``token`` is a byte-fallback token, which is text only with its neighbours."""
        return self.kind == "metaspace" and _BYTE_TOKEN.fullmatch(token) is not None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's steps; one that is no sequence is its own only step."""
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]
