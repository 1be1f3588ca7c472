"""Known graphics cards: memory, memory bandwidth and the link to the host.

Figures are the makers' data sheets'. Memory is what the card has for programs and driver together;
cards that ship with error correction on have less than their name says. Links are what a copy
from pinned memory reaches: about 12 GB/s on PCIe 3.0 x16 or 4.0 x8, 25 on 4.0 x16, 50 on 5.0 x16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from ingle.errors import ConfigError

GIB: Final = 1024**3
DEFAULT_LINK: Final = 25e9
"""Assumed for a card that is not in the table: PCIe 4.0 x16."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card.

    Attributes:
        name: As people write it.
        memory_gib: GiB of memory.
        bandwidth_gb: Memory bandwidth, 10^9 bytes a second.
        link_gb: Host to card, 10^9 bytes a second.
    """

    name: str
    memory_gib: float
    bandwidth_gb: float
    link_gb: float = 25

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory."""
        return int(self.memory_gib * GIB)


CARDS: Final = (
    Card("GTX 1080 Ti", 11, 484, 12),
    Card("Tesla P40", 22.5, 346, 12),
    Card("Tesla V100 16GB", 16, 900, 12),
    Card("Tesla V100 32GB", 32, 900, 12),
    Card("Tesla T4", 15, 320, 12),
    Card("RTX 2060", 6, 336, 12),
    Card("RTX 2070", 8, 448, 12),
    Card("RTX 2080", 8, 448, 12),
    Card("RTX 2080 Ti", 11, 616, 12),
    Card("Titan RTX", 24, 672, 12),
    Card("RTX 3050", 8, 224, 12),
    Card("RTX 3060", 12, 360),
    Card("RTX 3060 Ti", 8, 448),
    Card("RTX 3070", 8, 448),
    Card("RTX 3080", 10, 760),
    Card("RTX 3080 12GB", 12, 912),
    Card("RTX 3080 Ti", 12, 912),
    Card("RTX 3090", 24, 936),
    Card("RTX 3090 Ti", 24, 1008),
    Card("RTX 4060", 8, 272, 12),
    Card("RTX 4060 Ti", 8, 288, 12),
    Card("RTX 4060 Ti 16GB", 16, 288, 12),
    Card("RTX 4070", 12, 504),
    Card("RTX 4070 Super", 12, 504),
    Card("RTX 4070 Ti", 12, 504),
    Card("RTX 4070 Ti Super", 16, 672),
    Card("RTX 4080", 16, 717),
    Card("RTX 4080 Super", 16, 736),
    Card("RTX 4090", 24, 1008),
    Card("RTX 4080 Laptop", 12, 432, 12),
    Card("RTX 4090 Laptop", 16, 576, 12),
    Card("RTX 5060", 8, 448),
    Card("RTX 5060 Ti", 8, 448),
    Card("RTX 5060 Ti 16GB", 16, 448),
    Card("RTX 5070", 12, 672, 50),
    Card("RTX 5070 Ti", 16, 896, 50),
    Card("RTX 5080", 16, 960, 50),
    Card("RTX 5090", 32, 1792, 50),
    Card("RTX A2000", 12, 288),
    Card("RTX A4000", 16, 448),
    Card("RTX A4500", 20, 640),
    Card("RTX A5000", 24, 768),
    Card("RTX A6000", 48, 768),
    Card("RTX 2000 Ada", 16, 224, 12),
    Card("RTX 4000 Ada", 20, 360),
    Card("RTX 4500 Ada", 24, 432),
    Card("RTX 5000 Ada", 32, 576),
    Card("RTX 6000 Ada", 48, 960),
    Card("RTX PRO 6000", 96, 1792, 50),
    Card("L4", 22.5, 300),
    Card("A10", 22.5, 600),
    Card("A10G", 22.5, 600),
    Card("A30", 24, 933),
    Card("A40", 45, 696),
    Card("L40", 45, 864),
    Card("L40S", 45, 864),
    Card("A100 40GB", 40, 1555),
    Card("A100 80GB", 80, 2039),
    Card("H100", 80, 3350, 50),
    Card("H100 PCIe", 80, 2000, 50),
    Card("H200", 140, 4800, 50),
    Card("B200", 180, 8000, 50),
)


def find_card(name: str) -> Card:
    """The card of that name; case, dashes and the maker's name do not matter: ``4090`` will do.

    Raises:
        ConfigError: When it is not in the table, or several are meant.
    """
    wanted = _spelling(name)
    found = [card for card in CARDS if wanted in _spellings(card)]
    if len(found) == 1:
        return found[0]
    near = _near(wanted)
    known = ", ".join(near or [card.name for card in CARDS])
    raise ConfigError(
        f"--gpu {name!r} is not in the table of cards; "
        f"{'near it are' if near else 'known are'} {known}. For any other give its memory: "
        "--memory 24GiB."
    )


def _near(wanted: str) -> list[str]:
    """Names that contain ``wanted``, else those spelled nearly so."""
    longer = [card.name for card in CARDS if wanted and wanted in _spelling(card.name)]
    if longer:
        return longer
    names = {spelling: card.name for card in CARDS for spelling in sorted(_spellings(card))}
    close = get_close_matches(wanted, names, n=5, cutoff=0.7)
    return list(dict.fromkeys(names[spelling] for spelling in close))


def card_of_device(name: str) -> Card | None:
    """The card a driver calls ``name`` (``NVIDIA GeForce RTX 4090``, ``NVIDIA A100-SXM4-80GB``):
    the one most of whose words are in it, none being left over."""
    said = _words(name)
    found = [card for card in CARDS if _words(card.name) <= said]
    return max(found, key=lambda card: len(card.name), default=None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _spellings(card: Card) -> set[str]:
    full = _spelling(card.name)
    return {full, re.sub(r"^(rtx|gtx|tesla)(?=\d|[pvt]\d)", "", full)}


def _spelling(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
