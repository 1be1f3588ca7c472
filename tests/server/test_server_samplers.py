"""Sampler options over HTTP: names, aliases, and words turned into tokens."""

from __future__ import annotations

from typing import Any

import pytest
from server_under_test import Running

from ingle import SamplingParams

SAME_NAME: dict[str, Any] = {
    "top_a": 0.2,
    "tfs": 0.9,
    "typical_p": 0.8,
    "eta_cutoff": 3.0,
    "epsilon_cutoff": 3.0,
    "nsigma": 1.5,
    "smoothing_factor": 0.3,
    "smoothing_curve": 1.5,
    "xtc_threshold": 0.2,
    "xtc_probability": 0.5,
    "skew": 0.5,
    "dynatemp_min": 0.5,
    "dynatemp_max": 2.0,
    "dynatemp_exponent": 1.5,
    "temperature_last": True,
    "mirostat_mode": 2,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "no_repeat_ngram_size": 3,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_range": 512,
    "dry_max_ngram": 10,
    "dry_max_occurrences": 4,
    "dry_early_exit_match_len": 6,
    "allowed_token_ids": [1, 2, 3],
}
ALIASES = {
    "typical": "typical_p",
    "top_n_sigma": "nsigma",
    "dynatemp_high": "dynatemp_max",
    "dry_penalty_last_n": "dry_range",
}


def ask(shared: Running, path: str, **fields: Any) -> SamplingParams:
    """The parameters that reach the engine."""
    shape: dict[str, Any] = {"prompt": "hi"}
    if "chat" in path:
        shape = {"messages": [{"role": "user", "content": "hi"}]}
    with shared.client() as client:
        response = client.post(path, json={"model": "fake/model", **shape, **fields})
    assert response.status_code == 200, response.text
    return shared.engine.seen[-1].params


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_samplers_reach_the_engine_under_their_names(shared: Running, path: str) -> None:
    params = ask(shared, path, **SAME_NAME)
    found = {name: getattr(params, name) for name in SAME_NAME}
    assert found == {**SAME_NAME, "allowed_token_ids": (1, 2, 3)}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_other_names_mean_the_same(shared: Running, alias: str, name: str) -> None:
    params = ask(shared, "/v1/completions", **{alias: 1})
    assert getattr(params, name) == 1
    assert ask(shared, "/v1/completions", **{alias: 1, name: 0.5 if "dry" not in name else 2})


def test_null_is_as_good_as_absent(shared: Running) -> None:
    nothing = ask(shared, "/v1/completions")
    assert ask(shared, "/v1/completions", **dict.fromkeys([*SAME_NAME, *ALIASES])) == nothing


def test_bad_words_become_tokens_with_and_without_a_space(shared: Running) -> None:
    params = ask(shared, "/v1/completions", bad_words=["ab", "c"])
    assert params.bad_words_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99))


@pytest.mark.parametrize("breakers", [["\n", "ab"], '["\\n", "ab"]'])
def test_breakers_come_as_a_list_or_as_json(shared: Running, breakers: Any) -> None:
    fields = {"dry_multiplier": 1, "dry_sequence_breakers": breakers}
    assert ask(shared, "/v1/completions", **fields).dry_sequence_breaker_ids == (10, 98)


def test_dry_has_breakers_by_default(shared: Running) -> None:
    params = ask(shared, "/v1/completions", dry_multiplier=1)
    assert params.dry_sequence_breaker_ids == tuple(b'\n:"*')
