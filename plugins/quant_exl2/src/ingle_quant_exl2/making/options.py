"""The bit layouts a matrix may get, and what each costs. No torch here.

The tables are those exllamav2 0.3.2 chooses from: shares of the input features at descending
widths, and the rows of a group at each width.

Letters: N output features, K input features, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ingle_quant_exl2.layout import ROW_UNIT, Layout, Section


@dataclass(frozen=True, slots=True)
class BitPlan:
    """Which share of a matrix's rows has how many bits.

    Attributes:
        parts: (bits, share of the rows, rows of a group), widths descending; the last takes what
            is left.
    """

    parts: tuple[tuple[int, float, int], ...]

    def layout(self, in_features: int) -> Layout:
        """Its groups for K input features: shares are rounded up to whole groups, and the last
        group of the matrix may be shorter."""
        groups: list[Section] = []
        start = word = 0
        for index, (bits, share, size) in enumerate(self.parts):
            left = in_features - start
            wanted = left if index == len(self.parts) - 1 else min(in_features * share, left)
            for _ in range(math.ceil(wanted / size)):
                rows = min(size, in_features - start)
                group = Section(bits=bits, start=start, rows=rows, word=word)
                groups.append(group)
                start, word = group.stop, word + group.num_words
        return Layout(groups=tuple(groups))

    @classmethod
    def parse(cls, text: str) -> BitPlan:
        """From ``"5@10+4 g128"``: 5 bits for a tenth of the rows, 4 for the rest, groups of 128
        rows. A width may have groups of its own: ``"8@5/32+4 g128"``."""
        widths, _, size = text.partition(" g")
        parts = []
        for part in widths.split("+"):
            width, _, own_size = part.partition("/")
            bits, _, share = width.partition("@")
            rows = int(own_size or size)
            parts.append((int(bits), float(share or 100) / 100, rows))
        return cls(tuple(parts))


def stored_bits(layout: Layout, out_features: int) -> int:
    """Bits a matrix takes: codes, scale codes, largest scales, group table and permutation."""
    groups = len(layout.groups)
    codes = sum(group.rows * group.bits for group in layout.groups) * out_features
    return codes + groups * (4 * out_features + 16 + 32) + 32 * layout.in_features


def padded(out_features: int) -> int:
    """N as stored: a multiple of 32."""
    return -(-out_features // ROW_UNIT) * ROW_UNIT


Option = Mapping[str, BitPlan]
"""A layout for each of a block's linears, by the last part of its name."""


def _attention(*rows: str) -> tuple[Option, ...]:
    """Each row is the plan of q and k; after bars those of v and o where they differ from it."""
    options = []
    for row in rows:
        plans = [BitPlan.parse(part) for part in row.split(" | ")]
        query, value = plans[0], plans[min(1, len(plans) - 1)]
        output = plans[2] if len(plans) > 2 else query
        options.append({"q_proj": query, "k_proj": query, "v_proj": value, "o_proj": output})
    return tuple(options)


def _mlp(*rows: str) -> tuple[Option, ...]:
    """Each row is the plans of gate, up and down."""
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(
        dict(zip(names, (BitPlan.parse(part) for part in row.split(" | ")), strict=True))
        for row in rows
    )


ATTENTION: Final = _attention(
    "3@5+2 g64",
    "3@10+2 g64 | 3@25+2 g64",
    "3@10+2 g64 | 4@10+3 g128",
    "3@10+2 g64 | 4@10+3 g128 | 4@10+3 g128",
    "4@10+3 g128",
    "4@10+3 g128 | 4@10+3 g64",
    "4 g128",
    "4 g128 | 4 g64",
    "4 g64 | 4 g32",
    "4 g32",
    "5@10+4 g128 | 5@10+4 g64",
    "5@10+4 g64 | 5@10+4 g32",
    "5@10+4 g64 | 5 g64",
    "5@10+4 g32 | 5 g32",
    "6@10+5 g128 | 6 g128",
    "6@10+5 g32 | 6 g32",
    "6 g128",
    "6 g32 | 8 g32",
    "8 g128",
)
MLP: Final = _mlp(
    "3@5+2 g64 | 3@5+2 g64 | 6@5/32+3@20+2 g64",
    "3@10+2 g64 | 3@25+2 g64 | 6@5/32+3@20+2 g64",
    "3@10+2 g64 | 3@30+2 g64 | 5@5+3 g32",
    "3@10+2 g64 | 3@30+2 g64 | 5@5+4 g32",
    "4@10+3 g128 | 4@25+3 g128 | 8@5/32+4@10+3 g128",
    "4@10+3 g32 | 4@25+3 g32 | 8@5+4@10+3 g32",
    "4@10+3 g32 | 4@25+3 g32 | 8@5/32+4 g128",
    "4 g128 | 4 g32 | 8@5/32+4 g128",
    "4 g32 | 4 g32 | 8@5+4 g32",
    "5@10+4 g128 | 5@25+4 g128 | 8@5/32+5@10+4 g128",
    "5@10+4 g32 | 5@25+4 g32 | 8@5+5@10+4 g32",
    "6@10+5 g128 | 6@25+5 g128 | 8@5/32+6@10+5 g128",
    "6@10+5 g32 | 6@25+5 g32 | 8@5+6@10+5 g32",
    "6 g128 | 6 g128 | 8@5/32+6 g128",
    "8@10+6 g128 | 8@10+6 g128 | 8@15+6 g128",
    "8@10+6 g128 | 8@10+6 g128 | 8 g128",
    "8 g128 | 8 g128 | 8 g128",
)
HEAD: Final[Mapping[int, BitPlan]] = {
    2: BitPlan.parse("4@30+2 g32"),
    3: BitPlan.parse("4@15+3 g32"),
    4: BitPlan.parse("6@15+4 g32"),
    5: BitPlan.parse("6@15+5 g128"),
    6: BitPlan.parse("8@15+6 g128"),
    8: BitPlan.parse("8 g128"),
}
