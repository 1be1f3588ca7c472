"""A measured quantity: its repeats, their median and spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """What several measurements of the same thing gave."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """The figure of at least one measurement."""
        return cls(tuple(values))

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        """The smallest one."""
        return min(self.values)

    @property
    def highest(self) -> float:
        """The largest one."""
        return max(self.values)

    def over(self, other: Figure) -> Figure:
        """Ratios, pair by pair, of two that were measured in alternation."""
        return Figure(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def as_json(self, name: str) -> dict[str, float]:
        """``name``, ``name_min`` and ``name_max``."""
        return {name: self.median, f"{name}_min": self.lowest, f"{name}_max": self.highest}

    def text(self) -> str:
        """Median, lowest and highest."""
        return f"{self.median:.4g}  ({self.lowest:.4g} to {self.highest:.4g})"
