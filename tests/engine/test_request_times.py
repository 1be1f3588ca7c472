"""Where a request's time went, as the engine reports it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ingle import SamplingParams
from ingle.engine.engine_core import EngineCore


def test_a_finished_request_says_where_its_time_went(core_of: Callable[..., EngineCore]) -> None:
    core = core_of()
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, n=2))
    outputs = []
    while core.has_work():
        outputs += core.step()
    assert [output.times is not None for output in outputs] == [o.finished for o in outputs]
    times = outputs[-1].times
    assert times is not None
    assert min(times.queue_seconds, times.prefill_seconds, times.decode_seconds) >= 0
    stats = core.stats()
    for data in (stats.queue_seconds, stats.prefill_seconds, stats.decode_seconds):
        assert data.count == 1
    assert stats.prompt_lengths.total == 3
    assert stats.generation_lengths.total == 8
    assert stats.per_output_token_seconds.total == pytest.approx(times.decode_seconds / 3)


def test_a_request_given_up_early_counts_its_lengths_only(
    core_of: Callable[..., EngineCore],
) -> None:
    core = core_of()
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    output = core.abort("a")
    assert output is not None
    assert output.times is None
    stats = core.stats()
    assert (stats.queue_seconds.count, stats.prompt_lengths.count) == (0, 1)
