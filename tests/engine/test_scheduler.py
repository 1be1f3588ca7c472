"""The one rule: running first, then waiting, within a budget; who gives way; when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from ingle.engine.step import ModelRunnerOutput


def test_a_prompt_is_cut_into_chunks_of_the_budget(bench: Any) -> None:
    scene = bench(num_blocks=20, max_num_batched_tokens=8)
    sequence = scene.add(range(1, 21), max_tokens=3)
    scene.run()
    assert [plan.num_tokens for plan in scene.runner.plans] == [8, 8, 4, 1, 1]
    assert [plan.scheduled[0].samples for plan in scene.runner.plans] == [False, False] + [True] * 3
    scene.assert_undisturbed(sequence)
    scene.assert_all_free()


def test_decoding_goes_on_while_a_long_prompt_is_computed(bench: Any) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=8)
    first = scene.add([1, 2], max_tokens=8)
    scene.step()
    scene.add(range(1, 30), max_tokens=2)
    scene.step()
    plan = scene.runner.plans[-1]
    assert [len(item.token_ids) for item in plan.scheduled] == [1, 7]
    assert len(first.output_token_ids) == 2


def test_an_old_long_prompt_leaves_each_younger_sequence_a_token(bench: Any) -> None:
    scene = bench(num_blocks=40, max_num_batched_tokens=8, enable_prefix_caching=False)
    old = scene.add(range(1, 21), max_tokens=30)
    young = [scene.add([n, n], max_tokens=20) for n in (5, 6)]
    while not all(sequence.output_token_ids for sequence in young):
        scene.step()
    scene.scheduler._preempt(old)
    scene.step()  # lets it in again, behind the tokens of the others
    assert [len(item.token_ids) for item in scene.runner.plans[-1].scheduled] == [1, 1, 6]
    scene.step()
    assert [len(item.token_ids) for item in scene.runner.plans[-1].scheduled] == [6, 1, 1]
    scene.run()
    scene.assert_undisturbed(old, *young)


def test_no_more_sequences_run_than_allowed(bench: Any) -> None:
    scene = bench(num_blocks=40, max_num_seqs=2, max_num_batched_tokens=100)
    sequences = [scene.add([n], max_tokens=3) for n in range(1, 6)]
    scene.step()
    assert len(scene.scheduler.running) == 2
    scene.run()
    scene.assert_undisturbed(*sequences)


def test_no_more_sequences_run_than_a_step_has_tokens(bench: Any) -> None:
    scene = bench(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=2)
    sequences = [scene.add([n], max_tokens=3) for n in range(1, 6)]
    scene.step()
    assert len(scene.scheduler.running) == 2
    scene.run()
    scene.assert_undisturbed(*sequences)


def test_first_come_first_served(bench: Any) -> None:
    scene = bench(num_blocks=9, max_num_seqs=1)
    sequences = [scene.add([n] * 3, max_tokens=2) for n in range(1, 5)]
    ended = []
    while scene.scheduler.running or scene.scheduler.waiting:
        ended += [s for s in scene.step() if s.finished]
    assert ended == sequences


def test_a_prompt_that_must_wait_for_blocks_is_not_overtaken(bench: Any) -> None:
    scene = bench(num_blocks=7, max_num_batched_tokens=100, enable_prefix_caching=False)
    scene.add([1] * 12, max_tokens=4)
    big = scene.add([2] * 16, max_tokens=1)
    small = scene.add([3], max_tokens=1)
    scene.step()
    assert not big.block_table
    assert not small.block_table
    scene.run()
    scene.assert_undisturbed(big, small)


def test_the_youngest_gives_way_and_ends_with_the_same_tokens(bench: Any) -> None:
    for caching in (True, False):
        scene = bench(num_blocks=7, max_num_seqs=3, enable_prefix_caching=caching)
        sequences = [scene.add([n] * 4, max_tokens=14) for n in (1, 2, 3)]
        preempted = []
        while scene.scheduler.running or scene.scheduler.waiting:
            scene.step()
            if scene.runner.plans:
                preempted += scene.runner.plans[-1].preempted_request_ids
        assert "s1" not in preempted
        assert preempted[0] == "s3"
        assert scene.scheduler.num_preemptions >= 2
        scene.assert_undisturbed(*sequences)
        scene.assert_all_free()


def test_a_preempted_sequence_keeps_its_output_and_comes_first(bench: Any) -> None:
    scene = bench(num_blocks=6, max_num_seqs=2)
    first, second, third = (scene.add([n] * 7, max_tokens=30) for n in (1, 2, 3))
    while scene.scheduler.num_preemptions == 0:
        scene.step()
    assert second.output_token_ids
    assert second.num_computed_tokens == 0
    assert list(scene.scheduler.waiting) == [second, third]
    assert scene.scheduler.running == [first]


def test_a_prompt_is_not_admitted_into_the_last_block(bench: Any) -> None:
    scene = bench(num_blocks=4, max_num_seqs=3, enable_prefix_caching=False)
    first = scene.add([1] * 4, max_tokens=3)
    second = scene.add([2] * 8, max_tokens=2)
    scene.step()
    assert first.block_table
    assert not second.block_table  # two blocks are free, and the first will need one of them
    scene.run()
    assert scene.scheduler.num_preemptions == 0
    scene.assert_undisturbed(first, second)


def test_a_sequence_fills_the_whole_cache_and_ends_with_length(bench: Any) -> None:
    scene = bench(num_blocks=4, max_model_len=1000)
    sequence = scene.add([1, 2, 3], max_tokens=None)
    scene.run()
    assert sequence.num_tokens == 12
    assert sequence.finish_reason == "length"
    scene.assert_undisturbed(sequence)


def test_a_prompt_larger_than_the_cache_ends_with_an_error_instead_of_stalling(bench: Any) -> None:
    scene = bench(num_blocks=3)
    sequence = scene.add([1] * 9, max_tokens=1)
    other = scene.add([2], max_tokens=1)
    news = scene.step()
    assert sequence.finish_reason == "error"
    assert "--kv-cache-memory-bytes" in (sequence.error or "")
    assert news == [sequence, other]
    scene.assert_all_free()


def test_no_tokens_wanted_ends_without_a_step(bench: Any) -> None:
    scene = bench()
    sequence = scene.add([1, 2, 3], max_tokens=0)
    assert scene.step() == [sequence]
    assert sequence.finish_reason == "length"
    assert scene.runner.num_steps == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_family_computes_its_prompt_once_when_prefixes_are_cached(
    bench: Any, caching: bool
) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=16, enable_prefix_caching=caching)
    leader = scene.sequence(range(1, 11), max_tokens=3, temperature=1.0, seed=1)
    others = [
        scene.sequence(range(1, 11), leader=leader, max_tokens=3, temperature=1.0, seed=n)
        for n in (2, 3)
    ]
    for sequence in (leader, *others):
        scene.scheduler.add(sequence)
    scene.run()
    scene.assert_undisturbed(leader, *others)
    assert len({tuple(s.output_token_ids) for s in (leader, *others)}) == 3
    # Three prompts of 10; or one, and the last token of each of the others. Then two tokens each.
    assert scene.runner.num_computed == (12 if caching else 30) + 3 * 2


def test_a_family_goes_on_when_its_first_sequence_ends_early(bench: Any) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=4)
    leader = scene.sequence(range(1, 11), max_tokens=3)
    other = scene.sequence(range(1, 11), leader=leader, max_tokens=3)
    for sequence in (leader, other):
        scene.scheduler.add(sequence)
    scene.step()
    assert not other.block_table
    scene.scheduler.finish(leader, "abort")
    scene.run()
    scene.assert_undisturbed(other)


def test_a_family_that_waits_does_not_hold_up_others(bench: Any) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=16)
    leader = scene.sequence(range(1, 21), max_tokens=1)
    brother = scene.sequence(range(1, 21), leader=leader, max_tokens=1)
    for sequence in (leader, brother):
        scene.scheduler.add(sequence)
    scene.step()
    stranger = scene.add([7], max_tokens=1)
    scene.step()
    assert stranger.finished
    assert list(scene.scheduler.waiting) == [brother]
    scene.run()
    scene.assert_undisturbed(leader, brother, stranger)


def test_a_next_turn_computes_only_what_is_new(bench: Any) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=100)
    first = scene.add(range(1, 11), max_tokens=5)
    scene.run()
    before = scene.runner.num_computed
    turn = scene.add([*first.token_ids, 3, 3, 3], max_tokens=1)
    scene.run()
    # The last token of the first turn was never computed.
    assert scene.runner.num_computed - before == 4
    assert turn.num_cached_tokens == 14
    assert scene.runner.num_copies == 0
    assert scene.scheduler.prefix_cache_queries == 10 + 18
    assert scene.scheduler.prefix_cache_hits == 14
    scene.assert_undisturbed(turn)


def test_two_branches_of_a_conversation_run_at_once(bench: Any) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=100)
    scene.add(range(1, 11), max_tokens=1)
    scene.run()
    branches = [scene.add([*range(1, 10), n, n], max_tokens=8) for n in (20, 21, 22)]
    scene.run()
    assert [branch.num_cached_tokens for branch in branches] == [9, 9, 9]
    assert scene.runner.num_copies == 3
    scene.assert_undisturbed(*branches)
    scene.assert_all_free()


def test_a_prompt_is_shared_while_its_first_reader_still_runs(bench: Any) -> None:
    scene = bench(num_blocks=30, max_num_batched_tokens=100)
    first = scene.add(range(1, 11), max_tokens=9)
    scene.step()
    second = scene.add([*range(1, 11), 3], max_tokens=9)
    scene.run()
    assert second.num_cached_tokens == 10
    scene.assert_undisturbed(first, second)


def test_stops_in_the_order_of_the_rules(bench: Any) -> None:
    scene = bench(num_blocks=60)
    plain = scene.add([1, 2, 3], max_tokens=40)
    scene.run()
    tokens = plain.output_token_ids
    third = tokens[2]
    assert third not in tokens[:2]
    stopped = scene.add([1, 2, 3], max_tokens=40, stop_token_ids=(third,))
    at_limit = scene.add([1, 2, 3], max_tokens=3, stop_token_ids=(third,))
    later = scene.add([1, 2, 3], max_tokens=40, stop_token_ids=(third,), min_tokens=4)
    scene.run()
    assert stopped.output_token_ids == tokens[:3]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    assert (at_limit.finish_reason, at_limit.stop_reason) == ("stop", third)
    assert len(later.output_token_ids) > 3


def test_the_end_of_sequence_token_ends_unless_ignored_or_too_early(bench: Any) -> None:
    scene = bench(num_blocks=200, max_model_len=300)
    plain = scene.add([4], max_tokens=200)
    scene.run()
    at = plain.output_token_ids.index(0)
    assert at > 0
    ends = scene.add([4], max_tokens=200, ignore_eos=False)
    goes_on = scene.add([4], max_tokens=200, ignore_eos=False, min_tokens=at + 2)
    scene.run()
    assert len(ends.output_token_ids) == at + 1
    assert (ends.finish_reason, ends.stop_reason) == ("stop", None)
    assert len(goes_on.output_token_ids) > at + 1


def test_a_failed_row_ends_alone_and_is_not_reused(bench: Any) -> None:
    scene = bench(num_blocks=30)
    bad = scene.add([1] * 6, max_tokens=9)
    good = scene.add([2] * 6, max_tokens=9)
    scene.runner.row_error = lambda item: "NaN" if item.request_id == bad.sequence_id else None
    scene.step()
    assert (bad.finish_reason, bad.error) == ("error", "NaN")
    scene.runner.row_error = lambda _: None
    again = scene.add([1] * 6, max_tokens=2)
    scene.run()
    assert again.num_cached_tokens == 0
    scene.assert_undisturbed(good, again)
    scene.assert_all_free()


def test_a_row_the_runner_forgot_ends_with_an_error(bench: Any) -> None:
    scene = bench()
    sequence = scene.add([1], max_tokens=9)
    plan = scene.scheduler.schedule()
    scene.scheduler.update(plan, ModelRunnerOutput())
    assert sequence.finish_reason == "error"
    scene.assert_all_free()


def test_out_of_memory_ends_the_newest_and_the_others_lose_nothing(bench: Any) -> None:
    scene = bench(num_blocks=30)
    scene.add([9] * 6, max_tokens=1)
    scene.run()
    sequences = [scene.add([9] * 5 + [n], max_tokens=5) for n in (1, 2, 3)]
    plan = scene.scheduler.schedule()
    assert len(plan.block_copies) == 3
    (news,) = scene.scheduler.fail_newest(plan, "no memory")
    scene.scheduler.check_integrity()
    assert news.sequence is sequences[2]
    assert news.sequence.error == "no memory"
    again = scene.scheduler.schedule()
    assert again.block_copies == plan.block_copies[:2]
    scene.scheduler.update(again, scene.runner.execute(again))
    scene.run()
    scene.assert_undisturbed(*sequences[:2])
    scene.assert_all_free()


def test_aborting_frees_blocks_at_once_running_or_waiting(bench: Any) -> None:
    scene = bench(max_num_seqs=1)
    running, waiting = scene.add([1] * 6, max_tokens=9), scene.add([2] * 6, max_tokens=9)
    scene.step()
    for sequence in (running, waiting):
        scene.scheduler.finish(sequence, "abort")
        scene.scheduler.check_integrity()
    scene.assert_all_free()
    assert not scene.scheduler.running
    assert not scene.scheduler.waiting


def test_the_plan_is_empty_when_there_is_nothing_to_do(bench: Any) -> None:
    scene = bench()
    assert scene.scheduler.schedule().scheduled == ()
    assert scene.step() == []
