"""Sampling against formulas written in NumPy, and draws against the distribution they claim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ingle.request import SamplingParams
from ingle.sampling.sampler import DrawnToken, Sampler, SamplingRow
from ingle.sampling.stages import (
    CountPenalties,
    History,
    LogitBias,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from ingle.sampling.uniform import uniform

EMPTY = History(prompt_token_ids=(), output_token_ids=())


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def random_logits(size: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def kept(stage, logits: np.ndarray) -> set[int]:
    out = stage(torch.tensor(logits), EMPTY)
    return set(torch.isfinite(out).nonzero().flatten().tolist())


@pytest.mark.parametrize("k", [1, 5, 299, 300, 1000])
def test_top_k_keeps_the_k_likeliest(k: int) -> None:
    logits = random_logits(300)
    assert kept(TopK(k), logits) == set(np.argsort(-logits)[:k].tolist())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("size", [50, 3000])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, size: int) -> None:
    logits = random_logits(size, 3) / 4
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(softmax(logits.astype(np.float64))[order])
    count = 1 + int((before < p).sum())
    found = kept(TopP(p), logits)
    # The border token may fall either way in float32.
    assert set(order[: count - 1].tolist()) <= found <= set(order[: count + 1].tolist())
    assert order[0] in found


def test_min_p_keeps_tokens_near_the_likeliest() -> None:
    logits = random_logits(400, 5)
    p = softmax(logits.astype(np.float64))
    assert kept(MinP(0.05), logits) == set(np.flatnonzero(p >= 0.05 * p.max()).tolist())


def test_temperature_divides() -> None:
    logits = random_logits(20)
    out = Temperature(0.7)(torch.tensor(logits), EMPTY).numpy()
    np.testing.assert_allclose(out, logits / 0.7, rtol=1e-6)


def test_penalties_follow_openais_and_ctrls_formulas() -> None:
    logits = random_logits(10)
    history = History(prompt_token_ids=(1, 2), output_token_ids=(3, 3, 4))
    out = CountPenalties(0.5, 0.25)(torch.tensor(logits), history).numpy()
    wanted = logits.copy()
    wanted[3] -= 0.5 + 2 * 0.25
    wanted[4] -= 0.5 + 0.25
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    out = RepetitionPenalty(1.3)(torch.tensor(logits), history).numpy()
    wanted = logits.copy()
    for token in (1, 2, 3, 4):
        wanted[token] = wanted[token] / 1.3 if wanted[token] > 0 else wanted[token] * 1.3
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


def test_logit_bias_adds() -> None:
    logits = random_logits(10)
    out = LogitBias({2: 5.0, 7: -100.0})(torch.tensor(logits), EMPTY).numpy()
    assert out[2] == pytest.approx(logits[2] + 5)
    assert out[7] == pytest.approx(logits[7] - 100)


def test_uniform_numbers_are_uniform_and_repeat() -> None:
    numbers = np.array([uniform(seed, pos) for seed in range(100) for pos in range(100)])
    assert 0 <= numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, one in a thousand
    assert uniform(7, 3) == uniform(7, 3) != uniform(7, 4)


def draw(logits: np.ndarray, params: SamplingParams, seed: int, position: int = 0) -> DrawnToken:
    history = History(prompt_token_ids=(0,), output_token_ids=(0,) * position)
    row = SamplingRow(params=params, seed=seed, history=history)
    return Sampler(eos_token_ids=(5,))(torch.tensor(logits)[None].clone(), [row])[0]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    params = SamplingParams(temperature=1.0)
    tokens = [draw(logits, params, seed=s).token_id for s in range(4000)]
    counts = np.bincount(tokens, minlength=4)
    expected = np.array([1600, 1200, 800, 400])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees, one in a thousand


def test_a_seeded_draw_is_the_same_alone_and_in_a_batch() -> None:
    logits = torch.tensor(np.stack([random_logits(500, s) for s in range(16)]))
    rows = [
        SamplingRow(
            params=SamplingParams(temperature=0.5 + 0.1 * i, top_p=0.9, top_k=50 if i % 2 else 0),
            seed=i,
            history=History(prompt_token_ids=(1,), output_token_ids=(2,) * i),
        )
        for i in range(16)
    ]
    sampler = Sampler(())
    together = [t.token_id for t in sampler(logits.clone(), rows)]
    alone = [sampler(logits[i : i + 1].clone(), [rows[i]])[0].token_id for i in range(16)]
    assert together == alone


def test_greedy_takes_the_likeliest_and_tiny_temperatures_are_greedy() -> None:
    logits = random_logits(100)
    for temperature in (0.0, 1e-6):
        params = SamplingParams(temperature=temperature)
        assert draw(logits, params, seed=1).token_id == int(logits.argmax())


def test_min_tokens_bars_the_end_of_sequence() -> None:
    logits = np.zeros(10, dtype=np.float32)
    logits[5] = 50
    params = SamplingParams(temperature=0, min_tokens=3)
    assert draw(logits, params, seed=0, position=2).token_id != 5
    assert draw(logits, params, seed=0, position=3).token_id == 5


def test_a_row_without_finite_logits_fails_alone() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2] = float("nan")
    logits[:, 4] = 1
    row = SamplingRow(params=SamplingParams(temperature=0), seed=0, history=EMPTY)
    drawn = Sampler(())(logits, [row] * 3)
    assert [t.token_id for t in drawn] == [4, -1, 4]
    assert drawn[1].error is not None
    assert drawn[0].error is None


def test_logprobs_are_of_the_plain_distribution() -> None:
    logits = random_logits(50, 9)
    params = SamplingParams(temperature=0.3, logprobs=3, logit_bias={11: 100.0})
    token = draw(logits, params, seed=4)
    wanted = np.log(softmax(logits.astype(np.float64)))
    assert token.token_id == 11
    assert token.logprob is not None
    assert token.logprob.logprob == pytest.approx(wanted[11], abs=1e-4)
    assert token.logprob.rank == 1 + int((wanted > wanted[11]).sum())
    assert [i for i, _ in token.logprob.top] == np.argsort(-wanted)[:3].tolist()


@pytest.mark.parametrize(
    "error", [ValueError("x"), RuntimeError("x"), IndexError("x"), KeyError(1)]
)
def test_a_bad_processor_ends_its_own_row_and_no_other(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    logits = torch.tensor(np.stack([random_logits(30, seed) for seed in range(3)]))
    rows = [
        SamplingRow(params=SamplingParams(top_k=k, temperature=t), seed=7, history=EMPTY)
        for k, t in ((0, 1.0), (5, 1.0), (0, 0.0))
    ]
    wanted = Sampler(())(logits.clone(), rows)

    def fail(self: TopK, *_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(TopK, "__call__", fail)
    found = Sampler(())(logits.clone(), rows)
    assert (found[0], found[2]) == (wanted[0], wanted[2])
    assert found[1] == DrawnToken(error=f"drawing a token failed with {type(error).__name__}")


def test_lack_of_memory_in_one_row_is_the_whole_steps_affair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: TopK, *_: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(TopK, "__call__", fail)
    row = SamplingRow(params=SamplingParams(top_k=5), seed=7, history=EMPTY)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        Sampler(())(torch.zeros(1, 30), [row])
