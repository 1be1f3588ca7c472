"""Typed, checked reading of values from a parsed config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ingle.errors import CheckpointError

MAX_SIZE: Final = 2**31 - 1
"""No size in a config may exceed this, so that products of two fit in 64 bits."""


class ConfigValues:
    """One JSON object of a config file; every read is checked and errors name file and key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return self._values.get(key) is not None

    def present(self, key: str) -> bool:
        """Whether ``key`` is there, null or not."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value as parsed; None when absent."""
        return self._values.get(key)

    def size(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer from ``low`` to 2^31-1; ``default`` when absent or null."""
        value = self._or_default(key, default)
        if type(value) is not int or not low <= value <= MAX_SIZE:
            raise self.wrong(key, value, f"an integer from {low} to {MAX_SIZE}")
        return value

    def optional_size(self, key: str, *, low: int = 1) -> int | None:
        """As ``size``; None when absent or null."""
        return self.size(key, low=low) if self.has(key) else None

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number above 0")
        if not 0 < value < math.inf:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._or_default(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """No, one or several token ids below ``vocab_size``."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise self.wrong(key, value, f"token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        """The error for a value that cannot be used."""
        if value is None:
            return CheckpointError(f"{self.where}: {key} is missing; it must be {wanted}.")
        return CheckpointError(f"{self.where}: {key} must be {wanted}, but is {str(value)[:80]!r}.")

    def _or_default(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value
