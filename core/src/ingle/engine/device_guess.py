"""A small model's guesses by steps that stay on the device: all are enqueued before one is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ingle.engine.device_step import DeviceStep, RowStart
from ingle.request import SamplingParams

GREEDY: Final = SamplingParams(temperature=0.0)
MOST_GUESSED: Final = 32
"""Tokens guessed at once: a step's tokens can be read for a while only."""
MOST_GIVEN: Final = 4
"""Known tokens that are computed one a step. More are computed together, by the ordinary way: they
read the weights once, but their launches wait for the host."""
ROW: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGuesses:
    """Guesses of one sequence at a time, in the first row of the small model's own step.

    Attributes:
        step: A decode step that draws its own tokens; nobody else uses it.
    """

    step: DeviceStep

    def guess(
        self, known: Sequence[int], position: int, block_table: Sequence[int], count: int
    ) -> list[int]:
        """The tokens that follow, likeliest first to last, cut where logits were not finite.

        Args:
            known: Tokens that are not computed yet, one at least.
            position: Of the first of them.
            block_table: The sequence's blocks: room for the known tokens and all guesses but the
                last.
            count: Tokens to guess, ``MOST_GUESSED`` at most.
        """
        number = 0
        for place, token_id in enumerate(known, position):
            start = RowStart(
                token_id=token_id,
                position=place,
                block_table=block_table,
                params=GREEDY,
                seed=0,
                num_output=1,
            )
            self.step.place(ROW, start)
            number = self.step.run()
        numbers = [number, *(self.step.run() for _ in range(count - 1))]
        self.step.clear(ROW)
        drawn = [self.step.tokens(one)[ROW] for one in numbers]
        return drawn[: drawn.index(-1)] if -1 in drawn else drawn
