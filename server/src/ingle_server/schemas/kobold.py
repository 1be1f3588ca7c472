"""Kobold's API, as KoboldCpp and Aphrodite have it."""

from __future__ import annotations

from typing import Any

import msgspec

Body = dict[str, Any]


class KoboldRequest(msgspec.Struct, kw_only=True):
    """``/api/v1/generate``. What only changes how Kobold itself works is not read."""

    prompt: str
    memory: str | None = None
    max_length: int | None = None
    max_context_length: int | None = None
    n: int | None = None
    genkey: str | None = None
    stop_sequence: list[str] | None = None
    sampler_seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_a: float | None = None
    min_p: float | None = None
    typical: float | None = None
    tfs: float | None = None
    nsigma: float | None = None
    rep_pen: float | None = None
    presence_penalty: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    smoothing_factor: float | None = None
    smoothing_curve: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    xtc_threshold: float | None = None
    xtc_probability: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: str | list[str] | None = None
    dry_penalty_last_n: int | None = None
    sampler_order: list[int] | None = None
    rep_pen_range: int | None = None
    banned_strings: list[str] | None = None
    banned_tokens: list[str] | None = None
    custom_token_bans: str | list[int] | None = None
    use_default_badwordsids: bool | None = None
    bypass_eos: bool | None = None
    ban_eos_token: bool | None = None
    ignore_eos: bool | None = None
    trim_stop: bool | None = None
    render_special: bool | None = None
    grammar: str | None = None
    logit_bias: dict[str, float] | None = None
    images: list[Any] | None = None


class KoboldKey(msgspec.Struct, kw_only=True):
    """Which generation; the latest without a key."""

    genkey: str | None = None


class KoboldText(msgspec.Struct, kw_only=True):
    """A text to count."""

    prompt: str
    special: bool | None = None
