"""Fields under the names that TabbyAPI, Aphrodite, KoboldCpp and SillyTavern give them."""

from __future__ import annotations

from typing import Any

import pytest
from server_checks import check_error
from server_under_test import Running

from ingle import GrammarSpec, SamplingParams

MODEL = {"model": "fake/model"}
PATHS = ["/v1/completions", "/v1/chat/completions"]


def post(shared: Running, path: str, **fields: Any) -> Any:
    shape: dict[str, Any] = {"prompt": "hi"}
    if "chat" in path:
        shape = {"messages": [{"role": "user", "content": "hi"}]}
    with shared.client() as client:
        return client.post(path, json={**MODEL, **shape, **fields})


def ask(shared: Running, path: str = PATHS[0], **fields: Any) -> SamplingParams:
    """The parameters that reach the engine."""
    response = post(shared, path, **fields)
    assert response.status_code == 200, response.text
    return shared.engine.seen[-1].params


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a b", "C", "a b"], ("a b", "C")),
        ("one", ("one",)),
        (["", "x"], ("x",)),
        ([], ()),
        (None, ()),
    ],
)
def test_banned_strings_are_a_text_or_a_list(
    shared: Running, path: str, value: Any, expected: tuple[str, ...]
) -> None:
    assert ask(shared, path, banned_strings=value).banned_strings == expected


@pytest.mark.parametrize("value", [5, ["x" * 201], [5], ["x"] * 0 + [str(n) for n in range(1025)]])
def test_banned_strings_that_cannot_be_are_refused(shared: Running, value: Any) -> None:
    check_error(post(shared, PATHS[0], banned_strings=value), 400, "banned_strings")


@pytest.mark.parametrize("name", ["custom_token_bans", "banned_tokens"])
@pytest.mark.parametrize("value", [[7, 9], "7, 9", "[7,9]"])
def test_banned_ids_are_never_drawn(shared: Running, name: str, value: Any) -> None:
    assert ask(shared, **{name: value}).bad_words_token_ids == ((7,), (9,))
    assert ask(shared, **{name: value}, bad_words=["a"]).bad_words_token_ids[:2] == ((7,), (9,))
    assert ask(shared, **{name: ""}).bad_words_token_ids == ()


@pytest.mark.parametrize("name", ["custom_token_bans", "banned_tokens", "allowed_tokens"])
@pytest.mark.parametrize("value", [[300], [-1], "300", "a,b", "1.5", [1.5]])
def test_ids_that_are_none_are_refused_by_name(shared: Running, name: str, value: Any) -> None:
    check_error(post(shared, PATHS[0], **{name: value}), 400, name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        ["temperature", "top_p_top_k", "min_p"],
        ["TEMPERATURE", "TOP_P_TOP_K", "MIN_P"],
        [5, 0, 2],
        [5, "top_p_top_k", 2],
        "temperature\ntop_p_top_k\nmin_p",
        '["temperature", "top_k", "top_p", "min_p"]',
        ["dynamic_temperature", "top_k", "top_p", "mirostat", "min_p", "temperature"],
    ],
)
def test_the_order_of_samplers_comes_in_every_form(shared: Running, path: str, value: Any) -> None:
    order = ask(shared, path, sampler_priority=value).sampler_priority
    assert order == ("temperature", "top_k", "top_p", "min_p")


@pytest.mark.parametrize("value", [["hot"], [14], [-1], [5, 5], ["xtc", "XTC"], [True], [1.5], "a"])
def test_an_order_with_unknown_or_repeated_names_is_refused(shared: Running, value: Any) -> None:
    check_error(post(shared, PATHS[0], sampler_priority=value), 400, "sampler_priority")


def test_kobolds_order_is_understood_and_checked(shared: Running) -> None:
    order = ask(shared, sampler_order=[6, 0, 1, 3, 4, 2, 5]).sampler_priority
    assert order[:4] == ("dry", "penalties", "no_repeat_ngram", "top_k")
    assert order[-3:] == ("min_p", "temperature", "quadratic")
    check_error(post(shared, PATHS[0], sampler_order=[7]), 400, "sampler_order")
    check_error(post(shared, PATHS[0], sampler_order=[1, 1]), 400, "sampler_order")


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"penalty_range": 64}, "repetition_penalty_range", 64),
        ({"rep_pen_range": -1}, "repetition_penalty_range", 0),
        ({"repetition_range": 5}, "repetition_penalty_range", 5),
        ({"rep_pen": 1.2}, "repetition_penalty", 1.2),
        ({"rep_pen": 1.2, "repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"ban_eos_token": True}, "ignore_eos", True),
        ({"min_temp": 0.5, "max_temp": 1.5}, "dynatemp_max", 1.5),
        ({"temp_exponent": 2.0}, "dynatemp_exponent", 2.0),
        ({"allowed_tokens": "1,2"}, "allowed_token_ids", (1, 2)),
        ({"stop_sequence": ["a"], "stop": "b"}, "stop", ("b", "a")),
        ({"stopping_strings": list("abcdef"), "stop": list("abcdef")}, "stop", tuple("abcdef")),
        ({"grammar_string": 'root ::= "a"'}, "structured", GrammarSpec("grammar", 'root ::= "a"')),
        ({"regex_pattern": "a+"}, "structured", GrammarSpec("regex", "a+")),
        (
            {"json_schema": {"type": "object"}},
            "structured",
            GrammarSpec("json", '{"type":"object"}'),
        ),
        ({"grammar_string": "", "regex_pattern": "", "json_schema": ""}, "structured", None),
    ],
)
def test_other_names_mean_the_same_here(
    shared: Running, fields: dict[str, Any], name: str, expected: Any
) -> None:
    assert getattr(ask(shared, **fields), name) == expected


def test_openais_limit_of_stops_stays(shared: Running) -> None:
    check_error(post(shared, PATHS[0], stop=list("abcdef")), 400, "stop")
