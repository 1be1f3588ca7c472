"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingle.checkpoint.detokenizer import StopStrings

LETTERS = st.text("ab", max_size=30)


def run(stop: list[str], chunks: list[str], include: bool = False) -> tuple[str, str | None]:
    stops = StopStrings(stop, include)
    text = ""
    for chunk in chunks:
        emitted, hit = stops.push(chunk)
        text += emitted
        if hit is not None:
            return text, hit
    return text + stops.finish(), None


def first_to_end(stop: list[str], text: str) -> tuple[str, str | None]:
    """The same by trying every prefix: the obvious way, which is slow."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_text_before_the_stop_string_comes_through() -> None:
    assert run(["\n\n"], ["one\ntwo", "\n\nthree"]) == ("one\ntwo", "\n\n")


def test_a_stop_string_over_several_pieces_is_found() -> None:
    assert run(["###"], ["a#", "b#", "#", "#c"]) == ("a#b", "###")


def test_what_could_become_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["STOP"], False)
    assert stops.push("go ST") == ("go ", None)
    assert stops.push("AY") == ("STAY", None)
    assert stops.push("STO") == ("", None)
    assert stops.push("P now") == ("", "STOP")


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["STOP"], ["ST", "O"]) == ("STO", None)


def test_the_stop_string_may_stay_in_the_text() -> None:
    assert run(["END"], ["the EN", "D of it"], include=True) == ("the END", "END")


def test_the_first_stop_string_to_end_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["c", "abc"], ["abc"]) == ("", "abc")


def test_a_pattern_that_repeats_itself_is_found_after_a_false_start() -> None:
    assert run(["aab"], ["aaa", "ab"]) == ("aa", "aab")


def test_after_a_hit_nothing_more_comes() -> None:
    stops = StopStrings(["x"], False)
    assert stops.push("axb") == ("a", "x")
    assert stops.push("c") == ("", "x")
    assert stops.finish() == ""


def test_without_stop_strings_everything_comes_through() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    text=LETTERS,
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_result_does_not_depend_on_the_cuts(
    stop: list[str], text: str, cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[a:b] for a, b in pairwise(borders)]
    assert run(stop, chunks) == first_to_end(stop, text)


def test_the_work_is_linear_in_the_text() -> None:
    """Counts comparisons: a pattern and text of equal letters are the worst case."""

    class Counted(str):
        comparisons = 0

        def __getitem__(self, key: object) -> str:
            Counted.comparisons += 1
            return super().__getitem__(key)  # type: ignore[index]

    pattern = Counted("a" * 500 + "b")
    stops = StopStrings([pattern], False)
    Counted.comparisons = 0
    for _ in range(5000):
        stops.push("a")
    assert Counted.comparisons < 5 * 5000


@pytest.mark.parametrize("stop", ["\ud83d", "🙂", "e\u0301"])
def test_any_character_may_be_in_a_stop_string(stop: str) -> None:
    assert run([stop], [f"text{stop}more"]) == ("text", stop)
