"""What ``SamplingParams`` may hold. No torch here."""

from __future__ import annotations

import math
from typing import Any, Final

from ingle.errors import RequestError
from ingle.sampler_order import read_order

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_LOOKBACK = 1024
MAX_BANNED_STRINGS = 1024
MAX_BANNED_CHARS = 200
"""Of one banned string."""
_RANGES: Final = (
    ("top_a", 0.0, 1.0),
    ("tfs", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("eta_cutoff", 0.0, 10_000.0),
    ("epsilon_cutoff", 0.0, 10_000.0),
    ("nsigma", 0.0, None),
    ("smoothing_factor", 0.0, 100.0),
    ("smoothing_curve", 1.0, 3.0),
    ("xtc_threshold", 0.0, 1.0),
    ("xtc_probability", 0.0, 1.0),
    ("skew", -10.0, 10.0),
    ("dynatemp_min", 0.0, 10.0),
    ("dynatemp_max", 0.0, 10.0),
    ("dynatemp_exponent", 0.0, 100.0),
    ("mirostat_tau", 0.0, 100.0),
    ("mirostat_eta", 0.0, 100.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 10.0),
)
"""(name, lowest, highest) of the options that are numbers."""


def check_sampling(params: Any) -> None:
    """Puts a ``SamplingParams`` into its own types and checks it.

    Raises:
        RequestError: Naming the option, the value and what it may be.
    """
    _freeze(params)
    _check_integers(params)
    _check_floats(params)
    _check_stop(params)
    _check_banned(params)
    _read_priority(params)


def refuse(param: str, value: Any, wanted: str) -> RequestError:
    """The error for an option out of its range."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RequestError(f"{param} must be {wanted}, got {shown}.", param=param)


def _freeze(params: Any) -> None:
    """Lists as tuples."""
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    object.__setattr__(params, "stop", stop)
    object.__setattr__(params, "stop_token_ids", tuple(params.stop_token_ids))
    breakers, words = params.dry_sequence_breaker_ids, params.bad_words_token_ids
    object.__setattr__(params, "dry_sequence_breaker_ids", tuple(breakers))
    object.__setattr__(params, "bad_words_token_ids", tuple(tuple(word) for word in words))
    if not all(params.bad_words_token_ids):
        raise refuse("bad_words", (), "non-empty words")
    if params.allowed_token_ids is not None:
        object.__setattr__(params, "allowed_token_ids", tuple(params.allowed_token_ids))
        if not params.allowed_token_ids:
            raise refuse("allowed_token_ids", (), "at least one token id")


def _check_integer(params: Any, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    if value is None:
        return
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(name, value, wanted)
    if value < low or (high is not None and value > high):
        raise refuse(name, value, wanted)


def _check_integers(params: Any) -> None:
    _check_integer(params, "n", 1, MAX_N)
    _check_integer(params, "top_k", -1, None)
    _check_integer(params, "seed", -(2**63), 2**63 - 1)
    _check_integer(params, "max_tokens", 0, None)
    _check_integer(params, "min_tokens", 0, None)
    _check_integer(params, "logprobs", 0, MAX_LOGPROBS)
    _check_integer(params, "prompt_logprobs", 0, MAX_LOGPROBS)
    _check_integer(params, "no_repeat_ngram_size", 0, MAX_LOOKBACK)
    _check_integer(params, "dry_allowed_length", 1, MAX_LOOKBACK)
    _check_integer(params, "dry_range", 0, None)
    _check_integer(params, "repetition_penalty_range", 0, None)
    _check_integer(params, "dry_max_ngram", 1, MAX_LOOKBACK)
    _check_integer(params, "dry_max_occurrences", 1, MAX_LOOKBACK)
    _check_integer(params, "dry_early_exit_match_len", 1, MAX_LOOKBACK)
    if params.mirostat_mode not in (0, 2) or isinstance(params.mirostat_mode, bool):
        raise refuse("mirostat_mode", params.mirostat_mode, "0 or 2")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise refuse("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")


def _check_float(params: Any, name: str, low: float, high: float | None) -> None:
    value = getattr(params, name)
    wanted = f"a number of at least {low}" if high is None else f"a number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refuse(name, value, wanted)
    if value < low or (high is not None and value > high):
        raise refuse(name, value, wanted)


def _check_floats(params: Any) -> None:
    _check_float(params, "temperature", 0.0, 2.0)
    _check_float(params, "top_p", 0.0, 1.0)
    _check_float(params, "min_p", 0.0, 1.0)
    _check_float(params, "presence_penalty", -2.0, 2.0)
    _check_float(params, "frequency_penalty", -2.0, 2.0)
    _check_float(params, "repetition_penalty", 0.0, None)
    if params.repetition_penalty == 0:
        raise refuse("repetition_penalty", params.repetition_penalty, "greater than 0")
    for name, low, high in _RANGES:
        _check_float(params, name, low, high)
    if params.tfs == 0:
        raise refuse("tfs", params.tfs, "greater than 0")
    if params.dry_base <= 1:
        raise refuse("dry_base", params.dry_base, "greater than 1")
    if params.dynatemp_exponent == 0:
        raise refuse("dynatemp_exponent", params.dynatemp_exponent, "greater than 0")
    if params.dynatemp_min > params.dynatemp_max:
        raise refuse("dynatemp_min", params.dynatemp_min, "at most dynatemp_max")
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias) or not -100 <= bias <= 100:
            raise refuse("logit_bias", {token_id: bias}, "from -100 to 100 for every token")


def _check_stop(params: Any) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise refuse("stop", len(params.stop), f"at most {MAX_STOP_STRINGS} strings")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise refuse("stop", text, "a non-empty string")


def _check_banned(params: Any) -> None:
    object.__setattr__(params, "banned_strings", tuple(params.banned_strings))
    if len(params.banned_strings) > MAX_BANNED_STRINGS:
        raise refuse("banned_strings", len(params.banned_strings), f"at most {MAX_BANNED_STRINGS}")
    for text in params.banned_strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_BANNED_CHARS:
            raise refuse("banned_strings", text, f"texts of 1 to {MAX_BANNED_CHARS} characters")


def _read_priority(params: Any) -> None:
    if not params.sampler_priority:
        object.__setattr__(params, "sampler_priority", ())
        return
    try:
        order = read_order(params.sampler_priority)
    except ValueError as error:
        raise RequestError(f"sampler_priority: {error}.", param="sampler_priority") from None
    object.__setattr__(params, "sampler_priority", order)
