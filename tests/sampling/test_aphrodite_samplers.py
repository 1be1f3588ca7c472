"""Every further sampler against its formula in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ingle.errors import RequestError
from ingle.request import SamplingParams, check_token_ids
from ingle.sampler_order import SAMPLER_ORDER
from ingle.sampling.bans import AllowedTokens, BadWords
from ingle.sampling.pipeline import stages_for
from ingle.sampling.repetition import Dry, NoRepeatNgram
from ingle.sampling.reshaping import DynamicTemperature, ExcludeTopChoices, Quadratic, Skew
from ingle.sampling.sampler import Sampler, SamplingRow
from ingle.sampling.stages import History, RepetitionPenalty, Stage, Temperature, TopP
from ingle.sampling.truncation import (
    EpsilonCutoff,
    EtaCutoff,
    SurpriseLimit,
    TailFree,
    TopA,
    TopNSigma,
    Typical,
)

EMPTY = History(prompt_token_ids=(), output_token_ids=())
SEEDS = [0, 1, 2]


def after(*output: int) -> History:
    return History(prompt_token_ids=(), output_token_ids=output)


def random_logits(seed: int, size: int = 300) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def kept(stage: Stage, logits: np.ndarray) -> set[int]:
    before = torch.tensor(logits)
    out = stage(before.clone(), EMPTY)
    alive = torch.isfinite(out)
    assert torch.equal(out[alive], before[alive])
    return set(alive.nonzero().flatten().tolist())


def where(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(mask).tolist())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
def test_nsigma_keeps_logits_near_the_maximum(seed: int, n: float) -> None:
    logits = random_logits(seed)
    limit = logits.max() - n * logits.astype(np.float64).std()
    assert kept(TopNSigma(n), logits) == where(logits >= limit)


def test_nsigma_measures_only_tokens_that_are_left() -> None:
    logits = random_logits(0)
    logits[::2] = -np.inf
    limit = logits.max() - logits[1::2].astype(np.float64).std()
    assert kept(TopNSigma(1.0), logits) == where(logits >= limit)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("top_a", [0.05, 0.3, 1.0])
def test_top_a_grows_with_the_square_of_the_best(seed: int, top_a: float) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    assert kept(TopA(top_a), logits) == where(p >= top_a * p.max() ** 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("z", [0.5, 0.9, 0.99])
def test_tfs_cuts_where_the_curve_is_flat(seed: int, z: float) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    order = np.argsort(-p)
    second = np.abs(np.diff(np.diff(p[order])))
    over = np.cumsum(second / second.sum()) > z
    expected = {int(order[0]), *(int(order[i + 1]) for i in np.flatnonzero(~over))}
    assert kept(TailFree(z), logits) == expected
    assert 0 < len(expected) < 300


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("eta", [3.0, 50.0, 1000.0])
def test_eta_cutoff_depends_on_the_entropy(seed: int, eta: float) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    entropy = -(p * np.log(p)).sum()
    limit = min(eta * 1e-4, math.sqrt(eta * 1e-4) * math.exp(-entropy))
    assert kept(EtaCutoff(eta), logits) == where(p >= limit)


@pytest.mark.parametrize("seed", SEEDS)
def test_epsilon_cutoff_drops_below_a_probability(seed: int) -> None:
    logits = random_logits(seed)
    assert kept(EpsilonCutoff(20.0), logits) == where(probabilities(logits) >= 0.002)
    assert kept(EpsilonCutoff(10_000.0), logits) == {int(logits.argmax())}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mass", [0.2, 0.6, 0.95])
def test_typical_keeps_tokens_of_average_surprise(seed: int, mass: float) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    entropy = -(p * np.log(p)).sum()
    order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
    count = 1 + int((np.cumsum(p[order]) < mass).sum())
    assert kept(Typical(mass), logits) == set(order[:count].tolist())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("factor", "curve"), [(0.3, 1.0), (0.2, 1.7), (0.5, 3.0)])
def test_quadratic_bends_the_distance_to_the_maximum(
    seed: int, factor: float, curve: float
) -> None:
    logits = random_logits(seed)
    top = float(logits.max())
    d = logits.astype(np.float64) - top
    expected = top - (3 - curve) / 2 * factor * d**2 + (curve - 1) / 2 * factor * d**3
    logits[7] = -np.inf
    expected[7] = -np.inf
    found = Quadratic(factor, curve)(torch.tensor(logits), EMPTY).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_dynatemp_follows_the_entropy(seed: int) -> None:
    logits = random_logits(seed)
    p = probabilities(logits)
    share = -(p * np.log(p)).sum() / math.log(300)
    expected = logits / (0.5 + 1.5 * share**1.3)
    found = DynamicTemperature(0.5, 2.0, 1.3)(torch.tensor(logits), EMPTY).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_xtc_leaves_the_least_likely_of_the_top_choices() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
    assert kept(ExcludeTopChoices(0.12, 1.0, 5), logits) == {2, 3, 4}
    assert kept(ExcludeTopChoices(0.35, 1.0, 5), logits) == {0, 1, 2, 3, 4}
    assert kept(ExcludeTopChoices(0.12, 0.0, 5), logits) == {0, 1, 2, 3, 4}


def test_xtc_happens_as_often_as_asked_and_the_same_way_again() -> None:
    stage = ExcludeTopChoices(0.1, 0.3, 42)

    def hit(position: int) -> bool:
        out = stage(torch.tensor([2.0, 1.9, 0.0]), after(*range(position)))
        return not bool(torch.isfinite(out[0]))

    hits = [hit(position) for position in range(600)]
    assert 0.24 < np.mean(hits) < 0.36
    assert hits[:50] == [hit(position) for position in range(50)]


@pytest.mark.parametrize("skew", [-1.0, 0.5, 2.0])
def test_skew_bends_the_cumulated_probabilities(skew: float) -> None:
    logits = random_logits(3, 40)
    p = probabilities(logits)
    order = np.argsort(-p)
    shares = np.diff(np.cumsum(p[order]) ** math.exp(skew), prepend=0.0)
    expected = np.empty(40)
    expected[order] = shares
    found = probabilities(Skew(skew)(torch.tensor(logits), EMPTY).numpy())
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_surprise_limit_is_in_bits(seed: int) -> None:
    logits = random_logits(seed)
    assert kept(SurpriseLimit(6.0), logits) == where(-np.log2(probabilities(logits)) <= 6.0)


def test_mirostat_steers_surprise_to_its_target() -> None:
    sampler = Sampler([])
    params = SamplingParams(mirostat_mode=2, mirostat_tau=6.0, mirostat_eta=0.1)
    logits, output, surprises, mu = random_logits(1, 2000) / 2, [], [], 12.0
    p = probabilities(logits)
    for _ in range(300):
        row = SamplingRow(params=params, seed=9, history=after(*output), sequence_id="a")
        (drawn,) = sampler(torch.tensor(logits)[None], [row])
        surprise = -math.log2(p[drawn.token_id])
        assert surprise <= mu + 1e-4 or drawn.token_id == logits.argmax()
        mu -= 0.1 * (surprise - 6.0)
        surprises.append(surprise)
        output.append(drawn.token_id)
    assert abs(np.mean(surprises[50:]) - 6.0) < 0.3


def bans(stage: Stage, history: History, size: int = 20) -> set[int]:
    return where(np.isinf(stage(torch.zeros(size), history).numpy()))


@pytest.mark.parametrize(
    ("size", "prompt", "output", "expected"),
    [
        (2, (1, 2, 3), (1,), {2}),
        (2, (1, 2), (1, 3, 1), {2, 3}),
        (3, (1, 2, 3), (1, 2), {3}),
        (3, (1, 2, 3), (2,), set()),
        (1, (4,), (5,), {4, 5}),
        (4, (1,), (2,), set()),
        (3, (), (), set()),
    ],
)
def test_no_ngram_comes_twice(
    size: int, prompt: tuple[int, ...], output: tuple[int, ...], expected: set[int]
) -> None:
    history = History(prompt_token_ids=prompt, output_token_ids=output)
    assert bans(NoRepeatNgram(size), history) == expected


def test_bad_words_lose_their_last_token() -> None:
    stage = BadWords(((5,), (1, 2), (1, 2, 3)))
    assert bans(stage, after()) == {5}
    assert bans(stage, after(9, 1)) == {5, 2}
    assert bans(stage, after(1, 2)) == {5, 3}


def test_allowed_tokens_bar_all_others() -> None:
    assert bans(AllowedTokens((3, 4)), after(), 6) == {0, 1, 2, 5}


def dry(**changes: Any) -> Dry:
    options: dict[str, Any] = {
        "multiplier": 0.8,
        "base": 1.75,
        "allowed_length": 2,
        "breakers": frozenset(),
        "num_tokens": 0,
        "max_ngram": 12,
        "max_occurrences": 8,
        "early_exit_match_len": 8,
    }
    return Dry(**{**options, **changes})


def dry_formula(tokens: list[int], breakers: set[int], max_ngram: int) -> dict[int, float]:
    """Penalties by brute force: the longest run before each token that also ends the text."""
    found: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while (
            length < min(place, max_ngram)
            and tokens[place - 1 - length] == tokens[-1 - length]
            and tokens[place - 1 - length] not in breakers
        ):
            length += 1
        if length and tokens[place] not in breakers:
            found[tokens[place]] = max(length, found.get(tokens[place], 0))
    return {t: 0.8 * 1.75 ** (n - 2) for t, n in found.items() if n >= 2}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("breakers", [set(), {1}])
def test_dry_grows_with_the_repeated_run(seed: int, breakers: set[int]) -> None:
    tokens = np.random.default_rng(seed).integers(0, 3, 60).tolist()
    stage = dry(
        breakers=frozenset(breakers), max_ngram=6, max_occurrences=99, early_exit_match_len=99
    )
    expected = np.zeros(20)
    for token_id, penalty in dry_formula(tokens, breakers, 6).items():
        expected[token_id] = -penalty
    found = stage(torch.zeros(20), after(*tokens)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_dry_looks_back_only_so_far() -> None:
    tokens = [1, 2, 3, 9, 9, 1, 2]
    assert dry()(torch.zeros(20), after(*tokens))[3] < 0
    assert dry(num_tokens=4)(torch.zeros(20), after(*tokens))[3] == 0
    assert dry(max_occurrences=1)(torch.zeros(20), after(1, 2, 3, 5, 2, 4, 1, 2))[3] == 0


def test_a_run_of_any_length_has_a_finite_cost() -> None:
    stage = dry(base=10.0, max_ngram=1024, early_exit_match_len=1024, multiplier=100.0)
    assert torch.isfinite(stage(torch.zeros(20), after(*[7] * 900))).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "TopNSigma": {"nsigma": 1.0},
    "TopA": {"top_a": 0.2},
    "TailFree": {"tfs": 0.9},
    "EtaCutoff": {"eta_cutoff": 5.0},
    "EpsilonCutoff": {"epsilon_cutoff": 5.0},
    "Typical": {"typical_p": 0.9},
    "Quadratic": {"smoothing_factor": 0.2},
    "ExcludeTopChoices": {"xtc_probability": 0.5},
    "Skew": {"skew": 0.5},
    "DynamicTemperature": {"dynatemp_min": 0.5, "dynatemp_max": 1.5},
    "NoRepeatNgram": {"no_repeat_ngram_size": 3},
    "Dry": {"dry_multiplier": 0.8},
    "BadWords": {"bad_words_token_ids": [[5]]},
    "AllowedTokens": {"allowed_token_ids": list(range(280))},
}
ALL = {name: value for options in OPTIONS.values() for name, value in options.items()}


def names(params: SamplingParams) -> list[str]:
    return [type(stage).__name__ for stage in stages_for(params, [0])]


@pytest.mark.parametrize("stage", OPTIONS)
def test_an_option_builds_its_stage_and_no_other(stage: str) -> None:
    assert names(SamplingParams(**OPTIONS[stage])) == [stage]


def test_nothing_is_built_when_nothing_is_used() -> None:
    assert names(SamplingParams()) == []


def test_stages_come_in_aphrodites_order() -> None:
    built = names(
        SamplingParams(**ALL, top_p=0.9, min_p=0.1, presence_penalty=1, logit_bias={1: 1})
    )
    assert built == [
        *("AllowedTokens", "BadWords", "LogitBias", "Dry", "CountPenalties", "NoRepeatNgram"),
        *("DynamicTemperature", "TopNSigma", "TopP", "TopA", "MinP", "TailFree", "EtaCutoff"),
        *("EpsilonCutoff", "Typical", "Quadratic", "ExcludeTopChoices", "Skew"),
    ]


def test_temperature_last_moves_the_temperature() -> None:
    stages = stages_for(SamplingParams(temperature=2, top_p=0.5, temperature_last=True), [])
    assert stages == (TopP(0.5), Temperature(2))


def test_the_order_asked_for_is_the_order_built() -> None:
    asked = ["xtc", "min_p", 5, "TOP_P_TOP_K", "dry"]
    built = names(SamplingParams(**ALL, top_p=0.9, top_k=5, min_p=0.1, sampler_priority=asked))
    bars = ["AllowedTokens", "BadWords"]
    first = ["ExcludeTopChoices", "MinP", "DynamicTemperature", "TopK", "TopP", "Dry"]
    assert built[:8] == [*bars, *first]
    rest = ["NoRepeatNgram", "TopNSigma", "TopA", "TailFree", "EtaCutoff", "EpsilonCutoff"]
    assert built[8:] == [*rest, "Typical", "Quadratic", "Skew"]


def test_another_order_gives_other_logits() -> None:
    """Top-p at temperature 2 keeps more than top-p before it: by the formula."""
    logits = random_logits(0)
    for asked, scaled in (
        (["temperature", "top_p"], logits / 2),
        (["top_p", "temperature"], logits),
    ):
        p = probabilities(scaled)
        order = np.argsort(-p)
        count = 1 + int((np.cumsum(p[order]) < 0.8).sum())
        params = SamplingParams(temperature=2, top_p=0.8, sampler_priority=asked)
        out = torch.tensor(logits)
        for stage in stages_for(params, []):
            out = stage(out, EMPTY)
        assert where(np.isfinite(out.numpy())) == set(order[:count].tolist())


def test_an_order_names_what_there_is() -> None:
    every = [7, 6, 8, 5, 9, 0, 1, 2, 3, 10, 11, 4, 12, 13]
    order = SamplingParams(sampler_priority=every).sampler_priority
    assert order == SAMPLER_ORDER[:-1]
    for wrong in (["hot"], [14], [5, 5], [True]):
        with pytest.raises(RequestError, match="sampler_priority"):
            SamplingParams(sampler_priority=wrong)


@pytest.mark.parametrize("reach", [0, 2, 4, 99])
def test_the_repetition_penalty_looks_back_so_far(reach: int) -> None:
    history = History(prompt_token_ids=(1, 2, 3), output_token_ids=(4, 5))
    seen = [1, 2, 3, 4, 5][-reach or None :]
    out = RepetitionPenalty(2.0, reach)(torch.ones(8), history).tolist()
    assert [i for i, value in enumerate(out) if value == 0.5] == seen


def test_mirostat_replaces_the_truncations() -> None:
    params = SamplingParams(temperature=2, top_p=0.5, top_a=0.5, mirostat_mode=2, mirostat_tau=3)
    assert names(params) == ["Temperature"]


def test_all_together_draw_the_same_in_any_batch() -> None:
    logits = torch.tensor(np.stack([random_logits(seed) for seed in range(4)]))
    rows = [
        SamplingRow(
            params=SamplingParams(**ALL, temperature_last=bool(seed % 2)),
            seed=seed,
            history=after(1, 2, 3, 1, 2),
            sequence_id=str(seed),
        )
        for seed in range(4)
    ]
    together = Sampler([0])(logits.clone(), rows)
    assert all(drawn.error is None for drawn in together)
    alone = [Sampler([0])(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(4)]
    assert together == alone


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tfs", 0.0),
        ("top_a", 2.0),
        ("typical_p", math.nan),
        ("mirostat_mode", 1),
        ("no_repeat_ngram_size", -1),
        ("dry_base", 0.5),
        ("dynatemp_min", 1.0),
        ("allowed_token_ids", []),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "fields",
    [{"allowed_token_ids": [300]}, {"bad_words_token_ids": [[1, 300]]}],
)
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        check_token_ids(SamplingParams(**fields), 300)
