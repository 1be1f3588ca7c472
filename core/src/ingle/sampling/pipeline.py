"""Which stages a request needs, in their order; an option at its default builds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingle.request import SamplingParams
from ingle.sampling.bans import AllowedTokens, BadWords
from ingle.sampling.repetition import Dry, NoRepeatNgram
from ingle.sampling.reshaping import DynamicTemperature, ExcludeTopChoices, Quadratic, Skew
from ingle.sampling.stages import (
    BarTokens,
    CountPenalties,
    LogitBias,
    MinP,
    RepetitionPenalty,
    Stage,
    Temperature,
    TopK,
    TopP,
)
from ingle.sampling.truncation import EpsilonCutoff, EtaCutoff, TailFree, TopA, TopNSigma, Typical

Named = tuple[str, Stage]
"""A stage, and the part of ``ingle.sampler_order`` that it belongs to."""


def stages_for(
    params: SamplingParams, eos_token_ids: Sequence[int], seed: int = 0
) -> tuple[Stage, ...]:
    """The stages of a request: bars, bias, then what ``sampler_priority`` may reorder."""
    named = _penalties(params)
    if not params.greedy:
        temperature = _temperature(params)
        truncations = [] if params.mirostat_mode else _truncations(params, seed)
        last = params.temperature_last
        named += [*truncations, *temperature] if last else [*temperature, *truncations]
        if params.skew and not params.mirostat_mode:
            named.append(("skew", Skew(params.skew)))
    if params.sampler_priority:
        place = {name: at for at, name in enumerate(params.sampler_priority)}
        named.sort(key=lambda pair: place.get(pair[0], len(place)))
    return (*_bars(params, eos_token_ids), *(stage for _, stage in named))


def _bars(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[Stage]:
    stages: list[Stage] = []
    barred = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
    if params.allowed_token_ids is not None:
        stages.append(AllowedTokens(params.allowed_token_ids))
    if params.min_tokens and barred:
        stages.append(BarTokens(tuple(barred), params.min_tokens))
    if params.bad_words_token_ids:
        stages.append(BadWords(params.bad_words_token_ids))
    if params.logit_bias:
        stages.append(LogitBias(params.logit_bias))
    return stages


def _penalties(params: SamplingParams) -> list[Named]:
    stages: list[Named] = []
    if params.dry_multiplier:
        stages.append(("dry", _dry(params)))
    if params.repetition_penalty != 1:
        stage = RepetitionPenalty(params.repetition_penalty, params.repetition_penalty_range)
        stages.append(("penalties", stage))
    if params.presence_penalty or params.frequency_penalty:
        penalties = CountPenalties(params.presence_penalty, params.frequency_penalty)
        stages.append(("penalties", penalties))
    if params.no_repeat_ngram_size:
        stages.append(("no_repeat_ngram", NoRepeatNgram(params.no_repeat_ngram_size)))
    return stages


def _dry(params: SamplingParams) -> Dry:
    return Dry(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        breakers=frozenset(params.dry_sequence_breaker_ids),
        num_tokens=params.dry_range,
        max_ngram=params.dry_max_ngram,
        max_occurrences=params.dry_max_occurrences,
        early_exit_match_len=params.dry_early_exit_match_len,
    )


def _temperature(params: SamplingParams) -> list[Named]:
    if params.dynatemp_max > 0:
        low, high, exponent = params.dynatemp_min, params.dynatemp_max, params.dynatemp_exponent
        return [("temperature", DynamicTemperature(low, high, exponent))]
    plain: Stage = Temperature(params.temperature)
    return [("temperature", plain)] if params.temperature != 1 else []


def _truncations(params: SamplingParams, seed: int) -> list[Named]:
    """Aphrodite's order. Only what is wanted is built: this runs for every token."""
    smoothing = (params.smoothing_factor, params.smoothing_curve)
    xtc = (params.xtc_threshold, params.xtc_probability, seed)
    stages: list[tuple[bool, str, Callable[..., Stage], tuple[float, ...]]] = [
        (params.nsigma > 0, "top_nsigma", TopNSigma, (params.nsigma,)),
        (params.top_k > 0, "top_k", TopK, (params.top_k,)),
        (params.top_p < 1, "top_p", TopP, (params.top_p,)),
        (params.top_a > 0, "top_a", TopA, (params.top_a,)),
        (params.min_p > 0, "min_p", MinP, (params.min_p,)),
        (params.tfs < 1, "tfs", TailFree, (params.tfs,)),
        (params.eta_cutoff > 0, "eta_cutoff", EtaCutoff, (params.eta_cutoff,)),
        (params.epsilon_cutoff > 0, "epsilon_cutoff", EpsilonCutoff, (params.epsilon_cutoff,)),
        (params.typical_p < 1, "typical_p", Typical, (params.typical_p,)),
        (params.smoothing_factor > 0, "quadratic", Quadratic, smoothing),
        (params.xtc_probability > 0, "xtc", ExcludeTopChoices, xtc),
    ]
    return [(name, build(*values)) for wanted, name, build, values in stages if wanted]
