"""Blocks: who holds them, in which order they are given out, and what of them is reused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingle.engine.block_manager import BlockManager
from ingle.engine.free_blocks import FreeBlocks
from ingle.engine.prefix_index import PrefixIndex, chain_digest, common_prefix_length, root_digest
from ingle.engine.sequence import Sequence
from ingle.errors import ConfigError
from ingle.request import SamplingParams

SIZE = 4


def sequence(tokens: list[int], *, max_tokens: int = 100, salt: str | None = None) -> Sequence:
    return Sequence(
        sequence_id=f"s{tokens}",
        request_id="r",
        index=0,
        prompt_token_ids=tokens,
        params=SamplingParams(cache_salt=salt),
        seed=0,
        max_tokens=max_tokens,
    )


def computed(manager: BlockManager, tokens: list[int], **options: Any) -> Sequence:
    """A sequence that holds blocks and has all its tokens in them."""
    made = sequence(tokens, **options)
    assert manager.allocate(made)
    manager.commit_copies()
    made.num_computed_tokens = made.num_tokens
    manager.index(made, with_tail=True)
    return made


def freed(manager: BlockManager, tokens: list[int], **options: Any) -> list[int]:
    """The blocks of a sequence that came, was computed and went."""
    made = computed(manager, tokens, **options)
    table = made.block_table
    manager.free(made)
    return table


def test_a_cache_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        BlockManager(1, SIZE)


def test_the_null_block_is_never_given_out() -> None:
    manager = BlockManager(5, SIZE)
    assert manager.num_usable_blocks == manager.num_free_blocks == 4
    made = sequence(list(range(16)))
    assert manager.allocate(made)
    assert sorted(made.block_table) == [1, 2, 3, 4]
    assert manager.num_free_blocks == 0
    assert manager.usage == 1


def test_what_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(4, SIZE)
    freed(manager, list(range(8)))
    big = sequence(list(range(17)))
    assert not manager.allocate(big)
    assert big.block_table == []
    assert manager.num_free_blocks == 3
    manager.check_integrity([])
    assert manager.allocate(sequence(list(range(12))))


def test_headroom_is_left_free() -> None:
    manager = BlockManager(4, SIZE)
    assert not manager.allocate(sequence([1] * 8), headroom=2)
    assert manager.allocate(sequence([1] * 8), headroom=1)


def test_a_sequence_grows_by_the_block_it_lacks() -> None:
    manager = BlockManager(4, SIZE)
    made = computed(manager, [1, 2, 3, 4])
    assert manager.grow(made)
    assert len(made.block_table) == 1
    made.append(5)
    assert manager.grow(made)
    assert len(made.block_table) == 2
    manager.check_integrity([made])


def test_growing_fails_when_nothing_is_free() -> None:
    manager = BlockManager(2, SIZE)
    made = computed(manager, [1, 2, 3, 4])
    made.append(5)
    assert not manager.grow(made)
    assert len(made.block_table) == 1


def test_full_blocks_are_shared_by_reference() -> None:
    manager = BlockManager(10, SIZE)
    first = computed(manager, list(range(10)))
    second = sequence([*range(8), 99, 98])
    assert manager.allocate(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == 8
    assert manager.pending_copies == ()
    manager.check_integrity([first, second])


def test_a_match_that_ends_inside_a_block_copies_it_and_goes_on_after_the_match() -> None:
    manager = BlockManager(10, SIZE)
    first = computed(manager, list(range(8)))
    second = sequence([0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert manager.allocate(second)
    assert second.num_computed_tokens == 6
    assert manager.pending_copies == ((first.block_table[1], second.block_table[1]),)
    manager.check_integrity([first, second])


def test_the_longest_common_prefix_wins_among_siblings() -> None:
    manager = BlockManager(20, SIZE)
    tables = [freed(manager, [1, 2, *end]) for end in ([3], [4, 5], [4, 6], [7, 7], [])]
    third = sequence([1, 2, 4, 6, 8])
    assert manager.allocate(third)
    assert third.num_computed_tokens == 4
    assert third.block_table[0] == tables[2][0]


def test_one_token_at_least_is_left_to_compute() -> None:
    manager = BlockManager(10, SIZE)
    freed(manager, list(range(8)))
    again = sequence(list(range(8)))
    assert manager.allocate(again)
    assert again.num_computed_tokens == 7
    assert len(manager.pending_copies) == 1


def test_a_single_token_prompt_matches_nothing() -> None:
    manager = BlockManager(10, SIZE)
    freed(manager, [1, 2])
    again = sequence([1])
    assert manager.allocate(again)
    assert again.num_computed_tokens == 0


def test_a_tail_that_nobody_holds_is_continued_in_place() -> None:
    manager = BlockManager(10, SIZE)
    table = freed(manager, [1, 2, 3, 4, 5, 6])
    turn = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.allocate(turn)
    assert turn.num_computed_tokens == 6
    assert turn.block_table[:2] == table
    assert manager.pending_copies == ()
    manager.check_integrity([turn])


def test_a_tail_that_somebody_holds_is_copied() -> None:
    manager = BlockManager(10, SIZE)
    first = computed(manager, [1, 2, 3])
    second = sequence([1, 2, 3, 9])
    assert manager.allocate(second)
    assert second.block_table != first.block_table
    assert manager.pending_copies == ((first.block_table[0], second.block_table[0]),)


def test_a_tail_that_matches_in_part_is_copied_though_nobody_holds_it() -> None:
    manager = BlockManager(10, SIZE)
    table = freed(manager, [1, 2, 3])
    second = sequence([1, 2, 9])
    assert manager.allocate(second)
    assert manager.pending_copies == ((table[0], second.block_table[0]),)
    assert second.block_table != table


def test_a_source_stays_until_its_copy_was_executed() -> None:
    manager = BlockManager(3, SIZE)
    table = freed(manager, [1, 2, 3])
    second = sequence([1, 2, 9])
    assert manager.allocate(second)
    assert manager.num_free_blocks == 0
    assert not manager.allocate(sequence([7]))
    manager.commit_copies()
    assert manager.num_free_blocks == 1
    third = sequence([7])
    assert manager.allocate(third)
    assert third.block_table == table
    manager.check_integrity([second, third])


def test_a_copy_is_done_without_when_its_source_takes_the_last_block() -> None:
    manager = BlockManager(3, SIZE)
    freed(manager, [1, 2, 3])
    second = sequence([1, 2, 9, 9, 9])
    assert manager.allocate(second)
    assert second.num_computed_tokens == 0
    assert manager.pending_copies == ()
    manager.check_integrity([second])


def test_a_sequence_freed_before_its_copy_ran_leaves_no_copy_and_no_false_index() -> None:
    manager = BlockManager(10, SIZE)
    table = freed(manager, [1, 2, 3, 4, 5, 6, 7])
    second = sequence([1, 2, 3, 4, 5, 6, 9])
    assert manager.allocate(second)
    (copy,) = manager.pending_copies
    manager.free(second)
    assert manager.pending_copies == ()
    manager.check_integrity([])
    third = sequence([1, 2, 3, 4, 5, 6, 9])
    assert manager.allocate(third)
    assert manager.pending_copies[0][0] == table[1] != copy[1]


def test_tokens_of_a_copy_that_never_ran_are_not_indexed() -> None:
    manager = BlockManager(10, SIZE)
    first, second = computed(manager, [1, 2, 3]), sequence([1, 2, 9])
    assert manager.allocate(second)
    manager.discard(first)
    manager.free(second)
    third = sequence([1, 2, 5])
    assert manager.allocate(third)
    assert third.num_computed_tokens == 0
    manager.check_integrity([third])


def test_discarded_blocks_are_never_reused() -> None:
    manager = BlockManager(10, SIZE)
    made = computed(manager, list(range(10)))
    manager.discard(made)
    again = sequence(list(range(10)))
    assert manager.allocate(again)
    assert again.num_computed_tokens == 0
    manager.check_integrity([again])


def test_what_others_share_with_a_discarded_sequence_stays_theirs() -> None:
    manager = BlockManager(10, SIZE)
    first = computed(manager, list(range(10)))
    second = computed(manager, list(range(12)))
    manager.discard(first)
    manager.check_integrity([second])
    manager.free(second)
    manager.check_integrity([])


def test_different_salts_share_nothing() -> None:
    manager = BlockManager(20, SIZE)
    freed(manager, list(range(8)), salt="a")
    for salt, expected in (("b", 0), (None, 0), ("a", 7), ("", 0)):
        again = sequence(list(range(8)), salt=salt)
        assert manager.allocate(again)
        assert again.num_computed_tokens == expected, salt
        manager.discard(again)


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    manager = BlockManager(20, SIZE)
    freed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    other = sequence([2, 2, 2, 2, 5, 5, 5, 5, 5])
    assert manager.allocate(other)
    assert other.num_computed_tokens == 0


def test_without_prefix_caching_nothing_is_indexed() -> None:
    manager = BlockManager(10, SIZE, enable_prefix_caching=False)
    freed(manager, list(range(8)))
    again = sequence(list(range(8)))
    assert manager.allocate(again)
    assert again.num_computed_tokens == 0
    manager.check_integrity([again])


def test_the_same_content_is_indexed_once() -> None:
    manager = BlockManager(10, SIZE)
    first, second = sequence(list(range(8))), sequence(list(range(8)))
    for made in (first, second):
        assert manager.allocate(made)
    for made in (first, second):
        made.num_computed_tokens = 8
        manager.index(made)
    manager.check_integrity([first, second])
    manager.free(second)
    manager.free(first)
    assert manager.num_free_blocks == 9
    manager.check_integrity([])


def test_the_longest_unused_content_is_evicted_first_and_its_tail_before_its_beginning() -> None:
    manager = BlockManager(5, SIZE)
    old = freed(manager, [1, 1, 1, 1, 2, 2, 2, 2])
    new = freed(manager, [3, 3, 3, 3, 4, 4, 4, 4])
    taken = [computed(manager, [9 + i] * 4, max_tokens=0) for i in range(2)]
    assert [made.block_table[0] for made in taken] == [old[1], old[0]]
    for made in taken:
        manager.free(made)
    again = sequence([3, 3, 3, 3, 4, 4, 4, 4, 5])
    assert manager.allocate(again)
    assert again.num_computed_tokens == 8
    assert again.block_table[:2] == new


def test_use_makes_content_young_again() -> None:
    manager = BlockManager(3, SIZE)
    old = freed(manager, [1, 1, 1, 1])
    new = freed(manager, [2, 2, 2, 2])
    assert freed(manager, [1, 1, 1, 1, 1])[0] == old[0]
    fresh = computed(manager, [3, 3, 3, 3], max_tokens=0)
    assert fresh.block_table == new


def test_blank_blocks_are_used_before_any_content_is_evicted() -> None:
    manager = BlockManager(6, SIZE)
    kept = freed(manager, [1, 1, 1, 1])
    others = [computed(manager, [2 + i] * 4) for i in range(4)]
    assert kept[0] not in {made.block_table[0] for made in others}


def test_a_new_sequence_gets_a_run_of_blocks() -> None:
    manager = BlockManager(20, SIZE)
    holes = [computed(manager, [i] * 4, max_tokens=0) for i in range(12)]
    for made in holes[1::2]:
        manager.discard(made)
    long = sequence(list(range(16)), max_tokens=0)
    assert manager.allocate(long)
    first = long.block_table[0]
    assert long.block_table == list(range(first, first + 4))


def test_a_growing_sequence_takes_the_next_block() -> None:
    manager = BlockManager(40, SIZE)
    first = computed(manager, list(range(4)), max_tokens=12)
    second = computed(manager, list(range(50, 54)), max_tokens=12)
    for _ in range(12):
        for made in (first, second):
            made.append(1)
            assert manager.grow(made)
    for made in (first, second):
        start = made.block_table[0]
        assert made.block_table == list(range(start, start + 4))


def test_evicted_runs_become_runs_again() -> None:
    manager = BlockManager(5, SIZE)
    freed(manager, list(range(16)))
    other = sequence(list(range(100, 116)))
    assert manager.allocate(other)
    assert other.block_table == [1, 2, 3, 4]


def test_tampering_is_noticed() -> None:
    manager = BlockManager(5, SIZE)
    made = computed(manager, list(range(8)))
    with pytest.raises(RuntimeError, match="holders"):
        manager.check_integrity([])
    made.token_ids[0] = 77
    with pytest.raises(RuntimeError, match="does not hold"):
        manager.check_integrity([made])


def test_free_blocks_count_what_they_give_and_take() -> None:
    free = FreeBlocks(6)
    assert len(free) == 5
    taken = free.take(5, after=0, room=5)
    assert taken == [1, 2, 3, 4, 5]
    assert len(free) == 0
    free.add_cached(3)
    free.add_blank(5)
    assert 3 in free
    assert free.is_cached(3)
    assert not free.is_cached(5)
    assert free.take(2, after=0, room=2) == [3, 5]


def test_a_young_neighbour_is_not_evicted_for_the_sake_of_a_run() -> None:
    free = FreeBlocks(9)
    free.take(8, after=0, room=8)
    for block in (5, 6, 7, 8, 2):
        free.add_cached(block)
    assert free.take(1, after=1, room=1) == [5]
    assert free.take(1, after=5, room=1) == [6]


TOKENS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@given(TOKENS, TOKENS)
def test_the_common_prefix_is_what_a_loop_finds(left: Any, right: Any) -> None:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    assert common_prefix_length(left, right) == length


@given(st.lists(TOKENS.filter(bool), max_size=12), TOKENS, st.data())
def test_the_index_finds_the_longest_match_that_a_search_of_all_finds(
    children: Any, query: Any, data: Any
) -> None:
    index, parent = PrefixIndex(), root_digest(None)
    known = {}
    for block, tokens in enumerate(children, start=1):
        index.insert(parent, tokens, block)
    for block, tokens in enumerate(children, start=1):
        if block in index:
            known[block] = tokens
        else:
            assert any(common_prefix_length(tokens, t) == len(tokens) for t in children)
    if known:
        gone = data.draw(st.sampled_from(sorted(known)))
        assert index.remove(gone)
        del known[gone]
    index.check_integrity(6)
    block, length = index.find(parent, query)
    assert length == max([common_prefix_length(t, query) for t in known.values()], default=0)
    assert length == 0 or common_prefix_length(known[block], query) == length
    assert index.find(chain_digest(parent, (1,)), query) == (0, 0)


def test_a_digest_depends_on_every_token_and_on_what_came_before() -> None:
    root = root_digest(None)
    assert root_digest("") != root != root_digest("unsalted")
    assert chain_digest(root, [1, 2]) != chain_digest(root, [2, 1])
    assert chain_digest(root, [1, 2]) != chain_digest(root_digest("a"), [1, 2])
    assert chain_digest(root, [1, 2**40]) != chain_digest(root, [1, 2])
