"""Chooses an option for every block so that the whole stays within a budget of bits.

A multiple-choice knapsack: each block (a slot) offers options with a cost in bits and an error, and
the sum of error ** p is to be small. Solved by dynamic programming over the budget in steps, then
what rounding to steps left over is spent by single moves and by exchanges between two slots until
none helps. Deterministic, well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ingle.plugin import ConfigError

POWERS: Final = tuple(1.5 + 0.125 * step for step in range(17))
"""Exponents tried, 1.5 to 3.5: the larger, the more the worst block counts."""
STEPS: Final = 1 << 14
"""Steps the budget is cut into."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of a slot: what it costs in bits, and the error it leaves."""

    bits: int
    error: float


Slots = Sequence[Sequence[Choice]]


def allocate(slots: Slots, budget: int) -> list[int]:
    """The option of each slot: of the solutions for all powers, the one whose worst error is least.

    Args:
        slots: The options of each slot.
        budget: Bits for all slots together.

    Raises:
        ConfigError: When the cheapest options already need more.
    """
    solutions = [solve(slots, budget, power) for power in POWERS]
    worst = [max(slots[s][o].error for s, o in enumerate(chosen)) for chosen in solutions]
    return solutions[worst.index(min(worst))]


def solve(slots: Slots, budget: int, power: float) -> list[int]:
    """The option of each slot for one power.

    Raises:
        ConfigError: As ``allocate``.
    """
    values = [[option.error**power for option in slot] for slot in slots]
    costs = [[option.bits for option in slot] for slot in slots]
    cheapest = sum(min(cost) for cost in costs)
    if cheapest > budget:
        raise ConfigError(
            f"The smallest layouts of the decoder need {cheapest} bits, the target allows "
            f"{budget}: --bpw must be at least {cheapest / max(1, budget):.4f} times as much."
        )
    chosen = _dynamic(values, costs, budget)
    while _improve_one(chosen, values, costs, budget) or _exchange(chosen, values, costs, budget):
        pass
    return chosen


def _dynamic(values: list[list[float]], costs: list[list[int]], budget: int) -> list[int]:
    """The best options when costs are rounded up to whole steps of the budget; exact for budgets
    of up to ``STEPS`` bits above the cheapest."""
    cheapest = [min(cost) for cost in costs]
    room = budget - sum(cheapest)
    step = max(1, -(-room // STEPS))
    size = room // step + 1
    best = torch.zeros(size, dtype=torch.float64)
    picks = []
    for value, cost, least in zip(values, costs, cheapest, strict=True):
        reached = torch.full((len(value), size), float("inf"), dtype=torch.float64)
        for option, (worth, bits) in enumerate(zip(value, cost, strict=True)):
            shift = -(-(bits - least) // step)
            if shift < size:
                reached[option, shift:] = best[: size - shift] + worth
        best, pick = reached.min(0)
        picks.append(pick)
    return _trace(picks, costs, step, size)


def _trace(picks: list[torch.Tensor], costs: list[list[int]], step: int, size: int) -> list[int]:
    """The options that led to the end of the table, last slot first."""
    chosen: list[int] = []
    place = size - 1
    for pick, cost in zip(reversed(picks), reversed(costs), strict=True):
        option = int(pick[place])
        chosen.append(option)
        place -= -(-(cost[option] - min(cost)) // step)
    return chosen[::-1]


def _improve_one(
    chosen: list[int], values: list[list[float]], costs: list[list[int]], budget: int
) -> bool:
    """Makes the move of one slot that gains most per bit, where one fits; says whether it did."""
    room = budget - sum(c[o] for c, o in zip(costs, chosen, strict=True))
    best: tuple[float, int, int] | None = None
    for slot, old in enumerate(chosen):
        for option, value in enumerate(values[slot]):
            extra = costs[slot][option] - costs[slot][old]
            gain = values[slot][old] - value
            if gain > 0 and extra <= room:
                rate = gain / max(extra, 1)
                if best is None or rate > best[0]:
                    best = (rate, slot, option)
    if best is None:
        return False
    chosen[best[1]] = best[2]
    return True


def _exchange(
    chosen: list[int], values: list[list[float]], costs: list[list[int]], budget: int
) -> bool:
    """Makes the best pair of moves, one slot down for another up; says whether there was one."""
    room = budget - sum(c[o] for c, o in zip(costs, chosen, strict=True))
    moves = [
        (costs[s][o] - costs[s][chosen[s]], values[s][chosen[s]] - values[s][o], s, o)
        for s in range(len(chosen))
        for o in range(len(values[s]))
        if o != chosen[s]
    ]
    ups = sorted((move for move in moves if move[1] > 0), key=lambda move: -move[1])
    downs = sorted((move for move in moves if move[0] < 0), key=lambda move: -move[1])
    best: tuple[float, tuple[int, int], tuple[int, int]] | None = None
    for up_extra, up_gain, up_slot, up_option in ups:
        for down_extra, down_gain, down_slot, down_option in downs:
            total = up_gain + down_gain
            if total <= 1e-15 or (best is not None and total <= best[0]):
                break
            if down_slot != up_slot and up_extra + down_extra <= room:
                best = (total, (up_slot, up_option), (down_slot, down_option))
                break
    if best is None:
        return False
    for slot, option in best[1:]:
        chosen[slot] = option
    return True
