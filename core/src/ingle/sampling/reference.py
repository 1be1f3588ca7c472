"""Writes ``docs/samplers.md`` from the stages: ``python -m ingle.sampling.reference PATH``."""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, fields
from pathlib import Path
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
    (stages.RepetitionPenalty, ("repetition_penalty",)),
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

INTRODUCTION: Final = """\
# Samplers

Written by `python -m ingle.sampling.reference docs/samplers.md`; a test keeps it true.

A request's logits go through these stages from top to bottom. An option at its default builds no
stage. A grammar (see `decisions/structured-output.md`) bars tokens before all of them. At
temperature 0 everything from the temperature on is left out and the likeliest token is taken.

`temperature_last` moves the temperature (or the dynamic one) after XTC. `mirostat_mode` 2 replaces
everything from `nsigma` to `skew`.

Over HTTP, `bad_words` and `dry_sequence_breakers` are texts (the latter also as JSON in a string;
by default newline, colon, quote and asterisk). Other engines' names are understood: `typical` for
`typical_p`, `top_n_sigma` for `nsigma`, `dynatemp_low` and `dynatemp_high` for `dynatemp_min` and
`dynatemp_max`, `dry_penalty_last_n` for `dry_range`.

| stage | options and defaults | what it does |
|---|---|---|
"""


def reference() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_row(stage, options) for stage, options in STAGES)


def _row(stage: type[Any], options: tuple[str, ...]) -> str:
    lines = (inspect.getdoc(stage) or "").split("\n\nAttributes:")[0]
    values = " ".join(f"`{name}`&nbsp;{_default(name)}" for name in options)
    return f"| {stage.__name__} | {values} | {' '.join(lines.replace('``', '`').split())} |\n"


def _default(name: str) -> str:
    field = next(field for field in fields(SamplingParams) if field.name == name)
    value = field.default
    if value in (MISSING, None, ()):
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
