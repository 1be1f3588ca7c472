"""The choice of bits: within budget, exact where that can be checked, no worse than annealing."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ingle.plugin import ConfigError
from ingle_quant_exl2.making.allocate import Choice, allocate, solve
from ingle_quant_exl2.making.options import ATTENTION, MLP, padded, stored_bits

Slots = list[list[Choice]]


def random_slots(seed: int, num_slots: int, num_options: int) -> Slots:
    """Options as measuring gives them: errors that halve per bit, with noise, some dominated."""
    draw = random.Random(seed)
    slots = []
    for _ in range(num_slots):
        size, hardness = draw.choice([1000, 3000]), draw.uniform(0.02, 0.3)
        bits = [2.1, *sorted(draw.uniform(2.1, 8.1) for _ in range(num_options - 1))]
        slots.append(
            [
                Choice(int(b * size), hardness * 2.0 ** -(b - 2) * draw.uniform(0.8, 1.25))
                for b in bits
            ]
        )
    return slots


def budget_for(slots: Slots, bits_per_weight: float) -> int:
    sizes = [slot[-1].bits / 8.0 for slot in slots]
    return int(bits_per_weight * sum(sizes))


def spent(slots: Slots, chosen: list[int]) -> int:
    return sum(slot[o].bits for slot, o in zip(slots, chosen, strict=True))


def total(slots: Slots, chosen: list[int], power: float) -> float:
    return sum(slot[o].error ** power for slot, o in zip(slots, chosen, strict=True))


def anneal(slots: Slots, budget: int, power: float, seed: int) -> list[int]:
    """The peer's search as its description goes: temperature 2 down to 1e-4 by factors of 0.995,
    moves of one random slot that stay within the budget, then upgrades in order. Fewer moves per
    temperature than the peer's 1,000, but over a fifth of the slots."""
    draw = random.Random(seed)
    chosen, cost = [0] * len(slots), sum(slot[0].bits for slot in slots)
    values = [[option.error**power for option in slot] for slot in slots]
    temperature = 2.0
    while temperature > 1e-4:
        for _ in range(100):
            slot = draw.randrange(len(slots))
            option = draw.randrange(len(slots[slot]))
            extra = slots[slot][option].bits - slots[slot][chosen[slot]].bits
            delta = values[slot][option] - values[slot][chosen[slot]]
            allowed = cost + extra <= budget
            if allowed and (delta < 0 or draw.random() < math.exp(-delta / temperature)):
                chosen[slot], cost = option, cost + extra
        temperature *= 0.995
    for slot, options in enumerate(slots):
        while chosen[slot] + 1 < len(options):
            extra = options[chosen[slot] + 1].bits - options[chosen[slot]].bits
            if cost + extra > budget:
                break
            chosen[slot], cost = chosen[slot] + 1, cost + extra
    return chosen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("power", [1.5, 2.0, 3.5])
def test_small_problems_are_solved_as_well_as_trying_everything(seed: int, power: float) -> None:
    slots = random_slots(seed, 5, 5)
    budget = max(budget_for(slots, 4.0), spent(slots, [0] * 5) + 500)
    everything = itertools.product(range(5), repeat=5)
    best = min(
        total(slots, list(chosen), power)
        for chosen in everything
        if spent(slots, list(chosen)) <= budget
    )
    assert total(slots, solve(slots, budget, power), power) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("seed", "bits"), [(1, 2.8), (2, 3.0), (3, 4.3), (4, 6.0)])
def test_annealing_finds_nothing_better(seed: int, bits: float) -> None:
    slots = random_slots(seed, 12, 17)
    budget = budget_for(slots, bits)
    for power in (1.5, 2.5):
        annealed = min(total(slots, anneal(slots, budget, power, run), power) for run in range(3))
        assert total(slots, solve(slots, budget, power), power) <= annealed * (1 + 1e-12)


@pytest.mark.parametrize("bits", [2.7, 3.0, 3.7, 5.0, 7.0])
def test_the_budget_is_kept_and_nearly_used_up(bits: float) -> None:
    slots = random_slots(7, 60, 18)
    budget = budget_for(slots, bits)
    cost = spent(slots, allocate(slots, budget))
    assert budget * (1 - 0.004) <= cost <= budget


def test_more_bits_never_make_the_sum_worse() -> None:
    slots = random_slots(8, 40, 18)
    sums = [
        total(slots, solve(slots, budget_for(slots, b / 10), 2.0), 2.0) for b in range(28, 80, 4)
    ]
    assert sums == sorted(sums, reverse=True)


def test_the_same_measurement_gives_the_same_choice() -> None:
    slots = random_slots(9, 30, 18)
    budget = budget_for(slots, 3.3)
    assert allocate(slots, budget) == allocate(slots, budget)


def test_a_target_below_the_smallest_layouts_is_an_error_not_a_larger_file() -> None:
    slots = random_slots(10, 10, 10)
    with pytest.raises(ConfigError, match="must be at least"):
        allocate(slots, budget_for(slots, 1.0))


def test_the_tables_reach_from_two_to_eight_bits_and_obey_the_format() -> None:
    wide = {"q_proj": (4096, 4096), "k_proj": (4096, 4096), "v_proj": (4096, 4096)}
    wide |= {"o_proj": (4096, 4096), "gate_proj": (11008, 4096), "up_proj": (11008, 4096)}
    wide |= {"down_proj": (4096, 11008)}
    for table, expected in ((ATTENTION, (2.13, 8.04)), (MLP, (2.25, 8.04))):
        figures = []
        for option in table:
            bits = weights = 0
            for name, plan in option.items():
                rows, columns = wide[name][1], wide[name][0]
                layout = plan.layout(rows)
                widths = [group.bits for group in layout.groups]
                assert widths == sorted(widths, reverse=True)
                assert layout.in_features == rows
                assert all(group.rows % 32 == 0 for group in layout.groups)
                bits += stored_bits(layout, padded(columns))
                weights += rows * columns
            figures.append(bits / weights)
        assert (figures[0], figures[-1]) == pytest.approx(expected, abs=0.02)
