"""The second turn of a chat computes its new tokens and no others: counted in the runner."""

from __future__ import annotations

from typing import Any

import pytest

from ingle.request import SamplingParams


def turn(core: Any, prompt: list[int], **options: Any) -> tuple[list[int], int, int]:
    """The answer, the tokens computed for it, and those reported as cached."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6, **options)
    before = core.runner.num_computed
    core.add_request("turn", prompt, params)
    answer: list[int] = []
    cached = 0
    while core.has_work():
        for output in core.step():
            cached = output.num_cached_tokens
            for completion in output.outputs:
                answer += completion.token_ids
    return answer, core.runner.num_computed - before, cached


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_a_second_turn_computes_only_what_is_new(
    core_of: Any, block_size: int, length: int
) -> None:
    """Wherever in a block the first turn ends. Its last token was sampled and never computed."""
    core = core_of(block_size=block_size)
    first = [1 + n % 20 for n in range(length)]
    answer, computed, cached = turn(core, first)
    assert (computed, cached) == (length + 5, 0)
    history = [*first, *answer, 21, 22, 20]
    _, computed, cached = turn(core, history)
    known = length + 5
    assert cached == known
    assert computed == len(history) - known + 5


def test_a_third_turn_and_a_branch_compute_only_what_is_new(core_of: Any) -> None:
    core = core_of(block_size=8)
    answer, _, _ = turn(core, [1, 2, 3])
    second = [1, 2, 3, *answer, 9, 9]
    answer, _, _ = turn(core, second)
    third = [*second, *answer, 7]
    assert turn(core, third)[2] == len(second) + 5
    branch = [*second[:-1], 4, 4]
    assert turn(core, branch)[2] == len(second) - 1


def test_another_salt_computes_everything(core_of: Any) -> None:
    core = core_of()
    prompt = list(range(1, 14))
    turn(core, prompt, cache_salt="a")
    assert turn(core, prompt, cache_salt="b")[2] == 0
    assert turn(core, prompt)[2] == 0
    assert turn(core, prompt, cache_salt="a")[2] == len(prompt) - 1
