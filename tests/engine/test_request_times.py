"""Where a request's time went, as the engine reports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ingle import SamplingParams
from ingle.engine.engine_core import EngineCore
from ingle.engine.speculation import Drafter, Speculation
from ingle.engine.streams import merge_output
from ingle.request import RequestOutput, RequestTimes


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


def test_a_request_tells_what_was_guessed_for_it(
    core_of: Callable[..., EngineCore], drafter_of: Callable[..., Drafter]
) -> None:
    """As many as the engine's own counters, here with two requests of two sequences each."""
    core = core_of()
    core.scheduler.speculation = speculation = Speculation(drafter=Repeats, num_tokens=3)
    for name in "ab":
        core.add_request(name, [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True, n=2))
    for sequence in core.scheduler.waiting:
        sequence.drafter = drafter_of(sequence)
    times = []
    while core.has_work():
        times += [output.times for output in core.step() if output.times is not None]
    assert sum(each.num_draft_tokens for each in times) == speculation.num_draft_tokens > 0
    assert sum(each.num_accepted_tokens for each in times) == speculation.num_accepted_tokens > 0


class Repeats:
    """A drafter that guesses nothing; the test puts better ones in its place."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        return ()

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_reader_who_is_late_gets_the_times_too() -> None:
    times = RequestTimes(queue_seconds=1.0, prefill_seconds=2.0, decode_seconds=3.0)
    older, newer = RequestOutput(request_id="a"), RequestOutput(request_id="a", times=times)
    merge_output(older, newer)
    assert older.times == times


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
