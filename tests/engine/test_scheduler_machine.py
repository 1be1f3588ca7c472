"""Random requests, steps, aborts and failures; every cache slot and every token is checked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ingle.engine.sequence import Sequence, SequenceStatus

PROMPTS = st.one_of(
    st.lists(st.integers(1, 2), min_size=1, max_size=22),
    # Much in common, so that prefixes match at every place inside a block.
    st.builds(
        lambda length, end: [5] * length + end,
        st.integers(0, 20),
        st.lists(st.integers(5, 6), min_size=1, max_size=3),
    ),
)
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.one_of(st.none(), st.integers(0, 14))},
    optional={
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.tuples(st.integers(1, 22)),
        "cache_salt": st.sampled_from(["a", "b"]),
    },
)


def machine_of(bench: Any) -> type[RuleBasedStateMachine]:
    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            num_blocks=st.sampled_from([14, 10, 7, 5, 3, 2]),
            block_size=st.sampled_from([4, 8, 2, 1]),
            max_num_seqs=st.sampled_from([4, 3, 2, 1]),
            max_num_batched_tokens=st.sampled_from([20, 9, 5, 1]),
            max_model_len=st.sampled_from([60, 30, 9, 2]),
            enable_prefix_caching=st.sampled_from([True, True, True, False]),
            speculating=st.booleans(),
        )
        def begin(self, **options: Any) -> None:
            self.bench = bench(**options)
            self.live: list[Sequence] = []
            self.known: list[Sequence] = []

        @rule(prompt=PROMPTS, params=PARAMS, siblings=st.sampled_from([0, 0, 0, 1, 2]))
        def add(self, prompt: list[int], params: dict[str, Any], siblings: int) -> None:
            prompt = prompt[: max(1, self.bench.scheduler.max_model_len - 1)]
            leader = self.bench.sequence(prompt, temperature=1.0, seed=1, **params)
            family = [leader] + [
                self.bench.sequence(prompt, leader=leader, temperature=1.0, seed=2 + i, **params)
                for i in range(siblings)
            ]
            for sequence in family:
                self.bench.queue(sequence)
            self.live += family
            self.known += family[:1]

        @precondition(lambda self: getattr(self, "known", None))
        @rule(data=st.data(), end=st.lists(st.integers(1, 2), max_size=5), params=PARAMS)
        def go_on_from(self, data: st.DataObject, end: list[int], params: dict[str, Any]) -> None:
            """A conversation's next turn, or another branch of it."""
            tokens = data.draw(st.sampled_from(self.known)).token_ids
            length = data.draw(st.one_of(st.just(len(tokens)), st.integers(1, len(tokens))))
            self.add(prompt=[*tokens[:length], *end], params=params, siblings=0)

        @rule(count=st.integers(1, 6))
        def steps(self, count: int) -> None:
            for _ in range(count):
                before = self.progress_made()
                told = self.bench.step()
                if self.live:
                    assert told or self.progress_made() != before
                self.settle()

        @precondition(lambda self: getattr(self, "live", None))
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            sequence = data.draw(st.sampled_from(self.live))
            if not sequence.finished:
                self.bench.scheduler.finish(sequence, "abort")
                self.live.remove(sequence)

        @precondition(lambda self: getattr(self, "live", None))
        @rule(copies_ran=st.booleans())
        def out_of_memory(self, copies_ran: bool) -> None:
            plan = self.bench.scheduler.schedule()
            if copies_ran:
                self.bench.runner._copy(plan)
            if plan.scheduled:
                for news in self.bench.scheduler.fail_newest(plan, "no memory"):
                    if news.sequence.finish_reason == "error":
                        self.live.remove(news.sequence)
                self.settle()

        @precondition(lambda self: getattr(self, "live", None))
        @rule()
        def spoil_a_row(self) -> None:
            """One row fails, and what it wrote must never be read again."""
            plan = self.bench.scheduler.schedule()
            if not plan.scheduled:
                return
            spoilt = plan.scheduled[0]
            self.bench.runner.row_error = lambda item: "NaN" if item is spoilt else None
            table = list(spoilt.block_table)
            start = spoilt.num_computed_tokens
            outcome = self.bench.runner.execute(plan)
            self.bench.runner.row_error = lambda _: None
            size = self.bench.blocks.block_size
            for position in range(start, spoilt.seq_len):
                self.bench.runner.cache[table[position // size] * size + position % size] = b"NaN"
            for news in self.bench.scheduler.update(plan, outcome):
                if news.sequence.finish_reason == "error":
                    self.live.remove(news.sequence)
            self.settle()

        @precondition(lambda self: hasattr(self, "bench"))
        @invariant()
        def everything_agrees(self) -> None:
            self.bench.scheduler.check_integrity()
            assert len(self.bench.scheduler.running) <= self.bench.scheduler.limits.max_num_seqs

        def progress_made(self) -> int:
            return self.bench.runner.num_computed + self.bench.scheduler.num_preemptions

        def settle(self) -> None:
            for sequence in [s for s in self.live if s.finished]:
                if sequence.max_tokens > 0:
                    self.bench.assert_undisturbed(sequence)
                self.live.remove(sequence)

        def teardown(self) -> None:
            if not hasattr(self, "bench"):
                return
            limit = 4000
            while self.bench.scheduler.running or self.bench.scheduler.waiting:
                self.steps(1)
                limit -= 1
                assert limit, "the scheduler stalls"
            self.bench.step()
            self.settle()
            assert not self.live
            self.bench.assert_all_free()

    return SchedulerMachine


def test_no_order_of_events_loses_a_block_or_changes_a_token(bench: Any) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine_of(bench),
        settings=settings(
            max_examples=250,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_no_order_of_events_loses_a_block_or_changes_a_token_tried_longer(bench: Any) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine_of(bench),
        settings=settings(
            max_examples=1500,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_finished_sequence_is_in_no_queue(bench: Any) -> None:
    scene = bench()
    sequence = scene.add([1, 2, 3], max_tokens=2)
    scene.run()
    assert sequence.status is SequenceStatus.FINISHED
    assert not sequence.block_table
    scene.assert_all_free()
