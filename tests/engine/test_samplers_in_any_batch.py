"""Every sampler draws the tokens of a solo run: in batches, in chunks, preempted, with guesses.

On a tiny model in float32, with seeds: the tokens must be equal, not alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingle.engine.speculation import Speculation
from ingle.llm import LLM
from ingle.request import SamplingParams
from ingle.sampling.reference import STAGES

VOCAB_SIZE = 128
LENGTH = 24
SAMPLERS: dict[str, dict[str, Any]] = {
    "AllowedTokens": {"allowed_token_ids": range(20, 90)},
    "BarTokens": {"min_tokens": 12, "stop_token_ids": range(30, 60)},
    "BadWords": {"bad_words_token_ids": [[n] for n in range(40, 80)] + [[8, n] for n in range(40)]},
    "LogitBias": {"logit_bias": dict.fromkeys(range(0, 128, 3), 2.0)},
    "Dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "RepetitionPenalty": {"repetition_penalty": 1.4, "repetition_penalty_range": 9},
    "CountPenalties": {"presence_penalty": 0.7, "frequency_penalty": 0.5},
    "NoRepeatNgram": {"no_repeat_ngram_size": 2, "top_k": 8},
    "Temperature": {"temperature": 0.6, "temperature_last": True, "top_p": 0.9},
    "DynamicTemperature": {"dynatemp_min": 0.3, "dynatemp_max": 1.7, "dynatemp_exponent": 1.2},
    "TopNSigma": {"nsigma": 1.0},
    "TopK": {"top_k": 12},
    "TopP": {"top_p": 0.7},
    "TopA": {"top_a": 0.5},
    "MinP": {"min_p": 0.2},
    "TailFree": {"tfs": 0.7},
    "EtaCutoff": {"eta_cutoff": 90.0},
    "EpsilonCutoff": {"epsilon_cutoff": 90.0},
    "Typical": {"typical_p": 0.5},
    "Quadratic": {"smoothing_factor": 0.4, "smoothing_curve": 1.5},
    "ExcludeTopChoices": {"xtc_probability": 0.6, "xtc_threshold": 0.01},
    "Skew": {"skew": 0.7},
    "SurpriseLimit": {"mirostat_mode": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.3},
    "the order asked for": {"sampler_priority": ["xtc", "top_p", "temperature"], "top_p": 0.8}
    | {"temperature": 1.7, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "banned strings": {"banned_strings": list("aeinorstEUB ")},
    "the likeliest token": {"temperature": 0.0, "presence_penalty": 0.3},
    "all together": {"top_p": 0.95, "min_p": 0.01, "tfs": 0.99, "typical_p": 0.98, "top_k": 90}
    | {"xtc_probability": 0.4, "xtc_threshold": 0.05, "dry_multiplier": 0.8, "skew": 0.2}
    | {"repetition_penalty": 1.1, "smoothing_factor": 0.1, "dynatemp_max": 1.3, "nsigma": 2.5},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "in a batch": {},
    "in chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 32},
    "without a prefix cache": {"enable_prefix_caching": False},
    "preempted": {"kv_cache_memory_bytes": 24 * 8 * 256},
    "with prompt lookup": {"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 1},
}


class GuessesFrom:
    """Guesses the tokens of an answer that is known, every fifth of them wrongly."""

    def __init__(self, answer: list[int], num_prompt_tokens: int) -> None:
        self.answer = answer
        self.num_prompt_tokens = num_prompt_tokens

    def propose(self, token_ids: Any, limit: int) -> list[int]:
        at = len(token_ids) - self.num_prompt_tokens
        return [
            (token + (number % 5 == 4)) % VOCAB_SIZE
            for number, token in enumerate(self.answer[at : at + limit], start=at)
        ]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


def prompt_of(name: str) -> list[int]:
    """Repeats itself, differs between samplers, and is longer than a block."""
    first = list(SAMPLERS).index(name)
    return [7, 8, 9, 10, 11] * 4 + [first + 20, 7, 8]


def params_of(name: str) -> SamplingParams:
    settings = {"ignore_eos": True, "max_tokens": LENGTH, "seed": 3, **SAMPLERS[name]}
    return SamplingParams(**settings)


def engine(folder: Path, **options: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "block_size": 8, "speculative_model": "none"}
    fixed["kv_cache_memory_bytes"] = "1MiB"  # room for all, where not said otherwise
    return LLM(str(folder), **{**fixed, **options})


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> LLM:
    return engine(tiny_llama)


@pytest.fixture(scope="module")
def solo(alone: LLM) -> dict[str, tuple[list[int], str]]:
    """Every sampler's answer, each in an engine of its own turn."""
    return {name: answers(alone, [name])[name] for name in SAMPLERS}


def answers(llm: LLM, names: list[str]) -> dict[str, tuple[list[int], str]]:
    prompts, params = [prompt_of(name) for name in names], [params_of(name) for name in names]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    pairs = [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]
    return dict(zip(names, pairs, strict=True))


LONG = [pytest.mark.slow, pytest.mark.long]
QUICK = ("in chunks", "preempted")
"""The others are for the slow suite."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=() if n in QUICK else LONG) for n in SETTINGS],
)
def crowd(request: pytest.FixtureRequest, tiny_llama: Path) -> dict[str, tuple[list[int], str]]:
    """Every sampler's answer when all are asked at once."""
    llm = engine(tiny_llama, **SETTINGS[request.param])
    found = answers(llm, list(SAMPLERS))
    scheduler = llm._core.scheduler
    assert (request.param == "preempted") == (scheduler.num_preemptions > 0)
    if request.param == "with prompt lookup":
        assert scheduler.speculation is not None
        assert scheduler.speculation.num_accepted_tokens > 0
    scheduler.check_integrity()
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_as_if_alone(
    crowd: dict[str, Any], solo: dict[str, Any], name: str
) -> None:
    assert crowd[name] == solo[name]


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_the_same_with_guesses(
    alone: LLM, solo: dict[str, Any], name: str
) -> None:
    speculation = Speculation(
        drafter=lambda: GuessesFrom(solo[name][0], len(prompt_of(name))), num_tokens=6
    )
    alone._core.scheduler.speculation = speculation
    try:
        assert answers(alone, [name])[name] == solo[name]
    finally:
        alone._core.scheduler.speculation = None
    assert 0 < speculation.num_accepted_tokens <= speculation.num_draft_tokens


def test_every_sampler_is_here_and_changes_something(solo: dict[str, Any], alone: LLM) -> None:
    assert {stage.__name__ for stage, _ in STAGES} <= set(SAMPLERS)
    prompts = [prompt_of(name) for name in SAMPLERS]
    plain = SamplingParams(ignore_eos=True, max_tokens=LENGTH, seed=3)
    outputs = alone.generate(prompts, plain, use_tqdm=False)
    same = [
        name
        for name, output in zip(SAMPLERS, outputs, strict=True)
        if output.outputs[0].token_ids == solo[name][0]
    ]
    assert same == []
