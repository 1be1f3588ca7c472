"""What the stored zeros of a GPTQ layer mean: writers disagree, and some files lie.

*v1* files store zero - 1, *v2* files the zero itself. Most v1 writers subtracted from whole words,
so that a zero of 0 borrowed from its neighbour; adding the constant back to whole words is exact.

Shape letters: N output features, G groups, W words.
Sources: GPTQModel (also its conversion between v1 and v2 and pull request 2763), AutoGPTQ,
AutoRound; the whole rule is reproduced by ``tests/data/vectors/awq_gptq``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_loader import all_middle, integer_zeros
from ingle.plugin.affine_packing import unpack_bits

_TRUE_ZERO_LAYOUTS: Final = ("gptq_v2", "gptq_p", "auto_round", "auto_round:gptqmodel")
_TRUE_ZERO_METHODS: Final = ("gptq_v2", "gptq_p")

_LEGACY_CONSTANTS: Final = (0x24924924, 0x92492492, 0x49249249)
"""What GPTQModel before 7 subtracted from words 0, 1, 2 of every three of 3-bit zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRules:
    """How to read one module's zeros.

    Attributes:
        minus_one: The file is v1.
        symmetric: What the config says; None in old files.
        legacy: The config names a writer that got 3-bit zeros wrong.
        exact: The config names a writer that never lost a zero.
    """

    minus_one: bool
    symmetric: bool | None
    legacy: bool
    exact: bool

    @classmethod
    def of(cls, config: AffineConfig, name: str) -> ZeroRules:
        """The rules for module ``name``."""
        writers = quantizers(config)
        return cls(
            minus_one=config.layout not in _TRUE_ZERO_LAYOUTS
            and config.method not in _TRUE_ZERO_METHODS,
            symmetric=config.module(name).symmetric,
            legacy=any(_before_seven(writer) for writer in writers),
            exact=any(w.startswith("gptqmodel") for w in writers)
            or "autoround_version" in config.values,
        )


def quantizers(config: AffineConfig) -> tuple[str, ...]:
    """``meta.quantizer`` as ``("gptqmodel:7.7.0",)``: a string or a list in the wild."""
    meta = config.values.get("meta")
    found = meta.get("quantizer") if isinstance(meta, dict) else None
    entries = found if isinstance(found, list) else [found]
    return tuple(entry.lower() for entry in entries if isinstance(entry, str))


def _before_seven(quantizer: str) -> bool:
    writer, _, version = quantizer.partition(":")
    major = version.partition(".")[0]
    return writer == "gptqmodel" and major.isdigit() and int(major) < 7


def read_zeros(words: torch.Tensor, bits: int, count: int, rules: ZeroRules) -> torch.Tensor | None:
    """The zeros of a bit stream of ``count`` per row: uint8 [G, N], or None: all 2**(b-1).

    ``words`` is [G, W]. A symmetric file's zeros are in the middle whether they were stored as v1
    or v2: files with the wrong label exist.
    """
    as_stored = unpack_bits(words, bits, count)
    plus_one = _plus_one(words, as_stored, bits, rules)
    zeros = plus_one if rules.minus_one else as_stored
    if rules.symmetric and any(all_middle(z, bits) for z in (as_stored, plus_one)):
        return None
    return integer_zeros(zeros, bits)


def _plus_one(words: torch.Tensor, raw: torch.Tensor, bits: int, rules: ZeroRules) -> torch.Tensor:
    """The zeros of words that hold zero - 1, whose fields as stored are ``raw``."""
    if bits in (2, 4, 8):
        return unpack_bits(words + _ones(bits, words.element_size()), bits, raw.shape[1])
    fieldwise = (raw + 1) & ((1 << bits) - 1)
    if bits != 3 or words.dtype != torch.int32:
        return fieldwise
    legacy = _decode_legacy(words, raw.shape[1])
    known_symmetric = rules.symmetric is not False and all_middle(legacy, 3)
    if (known_symmetric and not all_middle(fieldwise, 3)) or rules.legacy:
        return legacy
    return fieldwise


def zeros_may_be_lost(words: torch.Tensor, bits: int, count: int, rules: ZeroRules) -> bool:
    """Whether AutoGPTQ may have written -1 over the rest of a word for a zero of 0.

    Its trace is a field of all ones, which an exact writer's file may hold as well.
    """
    if not rules.minus_one or rules.symmetric is not False or rules.exact:
        return False
    return bool((unpack_bits(words, bits, count) == (1 << bits) - 1).any())


def _ones(bits: int, word_bytes: int) -> int:
    """The word whose every field is 1: 0x11111111 for 4 bits in 32."""
    return sum(1 << shift for shift in range(0, 8 * word_bytes, bits))


def _decode_legacy(words: torch.Tensor, count: int) -> torch.Tensor:
    constants = torch.tensor(_LEGACY_CONSTANTS, dtype=torch.int64)
    added = words.to(torch.int64) + constants[torch.arange(words.shape[1]) % 3]
    wrapped = (added & 0xFFFFFFFF).to(torch.int64)
    low = torch.where(wrapped >= 1 << 31, wrapped - (1 << 32), wrapped).to(torch.int32)
    return unpack_bits(low, 3, count)
