"""docs/samplers.md says what the stages say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ingle.request import SamplingParams
from ingle.sampler_order import SAMPLER_ORDER
from ingle.sampling import bans, repetition, reshaping, stages, truncation
from ingle.sampling.reference import PRIORITY_NAMES, STAGES, reference

PAGE = Path(__file__).parents[2] / "docs" / "samplers.md"
NOT_SAMPLERS = {
    *("n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "cache_salt"),
    *("prompt_logprobs", "pooling", "banned_strings", "sampler_priority"),
    *("include_stop_str_in_output", "skip_special_tokens", "structured"),
}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), (
        "run: python -m ingle.sampling.reference docs/samplers.md"
    )


def test_every_stage_is_listed() -> None:
    classes = {
        item
        for module in (bans, repetition, reshaping, stages, truncation)
        for item in vars(module).values()
        if isinstance(item, type) and item.__module__ == module.__name__
    }
    assert classes - {stages.History, stages.Stage} == {stage for stage, _ in STAGES}


def test_every_option_is_listed() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert {name for _, options in STAGES for name in options} == names - NOT_SAMPLERS


def test_what_can_be_moved_is_named_as_it_is_asked_for() -> None:
    listed = [PRIORITY_NAMES[stage] for stage, _ in STAGES if stage in PRIORITY_NAMES]
    assert tuple(dict.fromkeys(listed)) == SAMPLER_ORDER
