"""Writes ``docs/samplers.md`` from the stages: ``python -m ingle.sampling.reference PATH``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ingle.request import SamplingParams
from ingle.sampling import bans, repetition, reshaping, stages, truncation

STAGES: Final[tuple[tuple[type[Any], tuple[str, ...]], ...]] = (
    (bans.AllowedTokens, ("allowed_token_ids",)),
    (stages.BarTokens, ("min_tokens",)),
    (bans.BadWords, ("bad_words_token_ids",)),
    (stages.LogitBias, ("logit_bias",)),
    (
        repetition.Dry,
        (
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_sequence_breaker_ids",
            "dry_range",
            "dry_max_ngram",
            "dry_max_occurrences",
            "dry_early_exit_match_len",
        ),
    ),
    (stages.RepetitionPenalty, ("repetition_penalty", "repetition_penalty_range")),
    (stages.CountPenalties, ("presence_penalty", "frequency_penalty")),
    (repetition.NoRepeatNgram, ("no_repeat_ngram_size",)),
    (stages.Temperature, ("temperature", "temperature_last")),
    (reshaping.DynamicTemperature, ("dynatemp_min", "dynatemp_max", "dynatemp_exponent")),
    (truncation.TopNSigma, ("nsigma",)),
    (stages.TopK, ("top_k",)),
    (stages.TopP, ("top_p",)),
    (truncation.TopA, ("top_a",)),
    (stages.MinP, ("min_p",)),
    (truncation.TailFree, ("tfs",)),
    (truncation.EtaCutoff, ("eta_cutoff",)),
    (truncation.EpsilonCutoff, ("epsilon_cutoff",)),
    (truncation.Typical, ("typical_p",)),
    (reshaping.Quadratic, ("smoothing_factor", "smoothing_curve")),
    (reshaping.ExcludeTopChoices, ("xtc_threshold", "xtc_probability")),
    (reshaping.Skew, ("skew",)),
    (truncation.SurpriseLimit, ("mirostat_mode", "mirostat_tau", "mirostat_eta")),
)
"""Every stage in its order, with the options that build it."""

PRIORITY_NAMES: Final[Mapping[type[Any], str]] = MappingProxyType(
    {
        repetition.Dry: "dry",
        stages.RepetitionPenalty: "penalties",
        stages.CountPenalties: "penalties",
        repetition.NoRepeatNgram: "no_repeat_ngram",
        stages.Temperature: "temperature",
        reshaping.DynamicTemperature: "temperature",
        truncation.TopNSigma: "top_nsigma",
        stages.TopK: "top_k",
        stages.TopP: "top_p",
        truncation.TopA: "top_a",
        stages.MinP: "min_p",
        truncation.TailFree: "tfs",
        truncation.EtaCutoff: "eta_cutoff",
        truncation.EpsilonCutoff: "epsilon_cutoff",
        truncation.Typical: "typical_p",
        reshaping.Quadratic: "quadratic",
        reshaping.ExcludeTopChoices: "xtc",
        reshaping.Skew: "skew",
    }
)
"""What ``sampler_priority`` calls a stage."""

INTRODUCTION: Final = """\
# Samplers

Written by `python -m ingle.sampling.reference docs/samplers.md`; a test keeps it true.

A request's logits go through these stages from top to bottom. An option at its default builds no
stage. A grammar (see `decisions/structured-output.md`) bars tokens before all of them. At
temperature 0 everything from the temperature on is left out and the likeliest token is taken.

`temperature_last` moves the temperature (or the dynamic one) after XTC. `mirostat_mode` 2 replaces
everything from `nsigma` to `skew`.

`sampler_priority` sets the order by the names in the table's second column; samplers it leaves out
come behind, in the order of the table. Aphrodite's names and numbers are understood
(`top_p_top_k` is `top_k`, then `top_p`), text-generation-webui's names too, in any case, as a list
or as a text with commas or line ends; an unknown name, or one that comes twice, is refused.
`sampler_order` takes KoboldCpp's numbers (0 top-k, 1 top-a, 2 top-p and min-p, 3 TFS, 4 typical,
5 temperature, 6 penalties). What has no name there is not moved.

Over HTTP, `bad_words` and `dry_sequence_breakers` are texts (the latter also as JSON in a string;
by default newline, colon, quote and asterisk). Other engines' names are understood: `typical` for
`typical_p`, `top_n_sigma` for `nsigma`, `dynatemp_low` and `dynatemp_high` (`min_temp`, `max_temp`)
for `dynatemp_min` and `dynatemp_max`, `temp_exponent` for `dynatemp_exponent`, `dry_penalty_last_n`
for `dry_range`, `rep_pen` for `repetition_penalty`, `penalty_range`, `repetition_range` and
`rep_pen_range` for `repetition_penalty_range`, `custom_token_bans` and `banned_tokens` (ids, as a
list or as `"1,2"`) for bad words of one token, `allowed_tokens` for `allowed_token_ids`,
`ban_eos_token` for `ignore_eos`.

## Banned strings

`banned_strings` (a text or a list, as in TabbyAPI) never appear in an answer, in upper or lower
case. When the text completes one, the sequence goes back to the token in which it began, that
token is barred at that place, and another one is drawn with a new random number. A stream holds
tokens back while their text may still become a banned string. What was taken back counts nowhere:
not in `usage`, not in penalties, not in a grammar. Of a stop string and a banned string the first
to be complete counts; of banned strings that end together the longest. At most 1,024 strings of 200
characters. A sequence goes back at most 256 times and four times per token of `max_tokens`; then
it ends before the string with `finish_reason` `length` and `stop_reason` `banned_strings`.

## Stages

| stage | in `sampler_priority` | options and defaults | what it does |
|---|---|---|---|
"""


def reference() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_row(stage, options) for stage, options in STAGES)


def _row(stage: type[Any], options: tuple[str, ...]) -> str:
    lines = (inspect.getdoc(stage) or "").split("\n\nAttributes:")[0]
    values = " ".join(f"`{name}`&nbsp;{_default(name)}" for name in options)
    name = PRIORITY_NAMES.get(stage)
    shown = f"`{name}`" if name else ""
    what = " ".join(lines.replace("``", "`").split())
    return f"| {stage.__name__} | {shown} | {values} | {what} |\n"


def _default(name: str) -> str:
    field = next(field for field in fields(SamplingParams) if field.name == name)
    value = field.default
    if value in (MISSING, None, ()):
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
