"""How the rows of one EXL2 matrix are cut into groups of equal bit width. No torch here.

Source of every rule: the format as exllamav2 0.3.2 writes and reads it.

Letters: N output features, K input features, G groups, W rows of ``q_weight`` (32-bit words).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ingle.plugin import CheckpointError

BIT_WIDTHS = (2, 3, 4, 5, 6, 8)
ROW_UNIT = 32
"""Rows per smallest piece: every group is a multiple of it, so every piece starts on a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A run of rows with one bit width: one group, or several neighbours.

    Attributes:
        bits: Bits per code.
        start: First row, in quantised order.
        rows: Number of rows, a multiple of 32.
        word: First row of ``q_weight``.
    """

    bits: int
    start: int
    rows: int
    word: int

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.start + self.rows

    @property
    def num_words(self) -> int:
        """Rows of ``q_weight`` it takes."""
        return self.rows * self.bits // 32


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The groups of one matrix, in row order.

    Attributes:
        groups: One section per group.
    """

    groups: tuple[Section, ...]

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Neighbouring groups of one bit width joined; at most six, widths descending."""
        return tuple(_join(tuple(run)) for _, run in groupby(self.groups, lambda g: g.bits))

    @cached_property
    def unit_groups(self) -> tuple[int, ...]:
        """Group of each 32 rows: K/32 numbers."""
        return tuple(
            index for index, group in enumerate(self.groups) for _ in range(group.rows // ROW_UNIT)
        )

    @property
    def in_features(self) -> int:
        """K."""
        return self.groups[-1].stop

    @property
    def num_words(self) -> int:
        """W."""
        return sum(group.num_words for group in self.groups)


def _join(groups: tuple[Section, ...]) -> Section:
    first = groups[0]
    rows = sum(group.rows for group in groups)
    return Section(bits=first.bits, start=first.start, rows=rows, word=first.word)


def parse_layout(name: str, q_groups: Sequence[int], num_words: int, in_features: int) -> Layout:
    """The layout that ``q_groups`` describes: pairs (bits, first word), read as unsigned.

    Group sizes are not stored: they follow from where the next group starts.

    Raises:
        CheckpointError: Naming ``name.q_groups`` when the pairs break a rule of the format.
    """
    tensor = f"{name}.q_groups"
    bits = [value & 0xFFFF for value in q_groups[0::2]]
    words = [value & 0xFFFF for value in q_groups[1::2]] + [num_words]
    _check_bits(tensor, bits)
    if not bits or words[0] != 0:
        raise CheckpointError(f"{tensor}: the first group must start at word 0, got {words[:1]}.")
    groups: list[Section] = []
    start = 0
    for index, width in enumerate(bits):
        rows = _group_rows(tensor, index, width, words[index + 1] - words[index])
        groups.append(Section(bits=width, start=start, rows=rows, word=words[index]))
        start += rows
    if start != in_features:
        raise CheckpointError(
            f"{tensor}: the groups hold {start} rows, but q_invperm has {in_features}."
        )
    return Layout(groups=tuple(groups))


def _check_bits(tensor: str, bits: Sequence[int]) -> None:
    for index, width in enumerate(bits):
        if width not in BIT_WIDTHS:
            raise CheckpointError(
                f"{tensor}: group {index} has {width} bits; EXL2 knows {BIT_WIDTHS}."
            )
    if list(bits) != sorted(bits, reverse=True):
        raise CheckpointError(f"{tensor}: bit widths must not increase, got {list(bits)}.")


def _group_rows(tensor: str, index: int, bits: int, num_words: int) -> int:
    rows, rest = divmod(num_words * 32, bits)
    if num_words < 1 or rest or rows % ROW_UNIT:
        raise CheckpointError(
            f"{tensor}: group {index} takes {num_words} words of {bits}-bit codes; a group needs "
            f"a multiple of {bits} words, that is of {ROW_UNIT} rows."
        )
    return rows
