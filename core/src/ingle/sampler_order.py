"""The order of samplers: its parts, and what other engines call them. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

SAMPLER_ORDER: Final = (
    "dry",
    "penalties",
    "no_repeat_ngram",
    "temperature",
    "top_nsigma",
    "top_k",
    "top_p",
    "top_a",
    "min_p",
    "tfs",
    "eta_cutoff",
    "epsilon_cutoff",
    "typical_p",
    "quadratic",
    "xtc",
    "skew",
)
"""Everything that ``sampler_priority`` can move, in the order it has without it: Aphrodite's."""

_IDS: Final[Mapping[int, tuple[str, ...]]] = MappingProxyType(
    {
        0: ("top_k", "top_p"),
        1: ("top_a",),
        2: ("min_p",),
        3: ("tfs",),
        4: ("typical_p",),
        5: ("temperature",),
        6: ("penalties",),
        7: ("dry",),
        8: ("no_repeat_ngram",),
        9: ("top_nsigma",),
        10: ("eta_cutoff",),
        11: ("epsilon_cutoff",),
        12: ("quadratic",),
        13: ("xtc",),
    }
)
"""Aphrodite's numbers (``SamplerID``)."""

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{name: (name,) for name in SAMPLER_ORDER},
        "top_p_top_k": ("top_k", "top_p"),
        "top_n_sigma": ("top_nsigma",),
        "nsigma": ("top_nsigma",),
        "typical": ("typical_p",),
        "no_repeat_ngram_size": ("no_repeat_ngram",),
        "smoothing_factor": ("quadratic",),
        # text-generation-webui's list is longer: several of its names are one part here, and
        # of two names only the first counts.
        "repetition_penalty": ("penalties",),
        "presence_penalty": ("penalties",),
        "frequency_penalty": ("penalties",),
        "dynamic_temperature": ("temperature",),
        "quadratic_sampling": ("quadratic",),
        "mirostat": (),
        "encoder_repetition_penalty": (),
        "adaptive_p": (),
    }
)

_KOBOLD: Final[tuple[tuple[str, ...], ...]] = (
    ("top_k",),
    ("top_a",),
    ("top_p", "min_p"),
    ("tfs",),
    ("typical_p",),
    ("temperature", "quadratic"),
    ("dry", "penalties", "no_repeat_ngram"),
)
"""KoboldCpp's numbers (``sampler_order``)."""


def read_order(asked: Iterable[str | int]) -> tuple[str, ...]:
    """The parts that ``asked`` names, in its order.

    Names count in any case; numbers are Aphrodite's.

    Raises:
        ValueError: Saying which entry is unknown or comes twice.
    """
    seen: set[str | int] = set()
    parts: dict[str, None] = {}
    for entry in asked:
        found = _find(entry)
        if found is None:
            names = ", ".join(SAMPLER_ORDER)
            raise ValueError(f"{str(entry)[:40]!r} is no sampler; there are {names}")
        key = entry.lower() if isinstance(entry, str) else entry
        if key in seen:
            raise ValueError(f"{str(entry)[:40]!r} comes twice")
        seen.add(key)
        parts.update(dict.fromkeys(found))
    return tuple(parts)


def read_kobold_order(asked: Sequence[int]) -> tuple[str, ...]:
    """The parts that KoboldCpp's numbers name, in their order.

    Raises:
        ValueError: Saying which number is unknown or comes twice.
    """
    for number in asked:
        if not 0 <= number < len(_KOBOLD):
            raise ValueError(f"{number} is no sampler; they go from 0 to {len(_KOBOLD) - 1}")
        if asked.count(number) > 1:
            raise ValueError(f"{number} comes twice")
    return tuple(part for number in asked for part in _KOBOLD[number])


def _find(entry: str | int) -> tuple[str, ...] | None:
    if isinstance(entry, bool):
        return None
    return _IDS.get(entry) if isinstance(entry, int) else _ALIASES.get(entry.strip().lower())
