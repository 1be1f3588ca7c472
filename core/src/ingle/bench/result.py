"""What a benchmark has found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ingle.bench.figure import Figure

OWN: Final = "ingle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found.

    Attributes:
        decode: Tokens a second by batch size, by engine: Ingle's under ``OWN``.
        prefill: Tokens a second, by engine.
        first_token: Seconds to the first token of the long prompt.
        first_token_cached: The same with its prefix in the cache; None without a cache.
        prefill_tokens: Of the long prompt.
        startup: Peers' seconds from the start of their process until they answered.
    """

    decode: dict[int, dict[str, Figure]]
    prefill: dict[str, Figure]
    first_token: Figure
    first_token_cached: Figure | None
    prefill_tokens: int
    startup: dict[str, float] = field(default_factory=dict)

    def comparisons(self) -> Iterator[tuple[str, str, Figure, Figure]]:
        """(peer, quantity, Ingle's figure, the peer's): what can be set side by side."""
        rows = {f"decode_batch_{size}": found for size, found in self.decode.items()}
        for quantity, found in {**rows, "prefill": self.prefill}.items():
            for name, figure in found.items():
                if name != OWN:
                    yield name, quantity, found[OWN], figure
