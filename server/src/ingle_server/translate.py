"""From request fields to ``SamplingParams``: every range checked, every refusal by field name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingle import GrammarSpec, SamplingParams
from ingle.request import check_token_ids
from ingle.sampling_checks import MAX_N
from ingle_server.engine_client import ModelInfo
from ingle_server.errors import ApiError, bad_request, shown
from ingle_server.flight import Prompt
from ingle_server.lacking import check_lacking
from ingle_server.schemas.sampling import SamplingFields
from ingle_server.spellings import spelled_values, stop_strings
from ingle_server.words import Words

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 4096
MAX_CACHE_SALT = 128

_COPIED = (
    "n",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "cache_salt",
    "allowed_token_ids",
    "prompt_logprobs",
    "top_a",
    "tfs",
    "typical_p",
    "eta_cutoff",
    "epsilon_cutoff",
    "nsigma",
    "smoothing_factor",
    "smoothing_curve",
    "xtc_threshold",
    "xtc_probability",
    "skew",
    "dynatemp_min",
    "dynatemp_max",
    "dynatemp_exponent",
    "temperature_last",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "no_repeat_ngram_size",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_range",
    "dry_max_ngram",
    "dry_max_occurrences",
    "dry_early_exit_match_len",
)
"""Fields that ``SamplingParams`` knows under the same name and whose ranges it checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How a door treats what is too much.

    Attributes:
        max_stops: Stop strings at most.
        cuts_tokens: Whether more tokens than the context leaves are cut to what it leaves, as
            Ollama and Kobold do it, instead of refused.
    """

    max_stops: int = MAX_STOP_STRINGS
    cuts_tokens: bool = False

    def cut(self, asked: tuple[str, int | None]) -> tuple[str, int | None]:
        """``asked`` as ``token_budget`` is to hold to it."""
        return (asked[0], None) if self.cuts_tokens else asked

    def default(self, asked: tuple[str, int | None], default: int | None) -> int | None:
        """``default``, or what was asked where that is cut like one."""
        return default if not self.cuts_tokens or asked[1] is None else asked[1]


STRICT = Limits()
"""OpenAI's."""
LENIENT = Limits(max_stops=64, cuts_tokens=True)
"""Ollama's and Kobold's."""


def check_fields(fields: SamplingFields, info: ModelInfo, limits: Limits = STRICT) -> None:
    """Checks everything that does not need the prompt, so that it is cheap to be refused.

    Raises:
        ApiError: 400.
        RequestError: 400, from ``SamplingParams``.
    """
    _check_stream_options(fields)
    _check_stop(fields, limits.max_stops)
    _check_cache_salt(fields.cache_salt)
    check_lacking(fields)
    check_logprobs("prompt_logprobs", fields.prompt_logprobs)
    if fields.stream and fields.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed.", "prompt_logprobs")
    if fields.truncate_prompt_tokens is not None:
        _check_truncation(fields.truncate_prompt_tokens, info)
    params = sampling_params(fields, info, max_tokens=None, logprobs=None)
    check_token_ids(params, info.vocab_size)


def sampling_params(
    fields: SamplingFields,
    info: ModelInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: GrammarSpec | None = None,
    words: Words | None = None,
) -> SamplingParams:
    """The engine's parameters. The model's generation defaults stand where the client says nothing.

    Raises:
        RequestError: 400.
    """
    values: dict[str, Any] = dict(info.generation_defaults) | spelled_values(fields, info)
    for name in _COPIED:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    if values.get("top_k") is not None:
        values["top_k"] = min(values["top_k"], info.vocab_size)  # 2**70 keeps all, too
    values["stop"] = stop_strings(fields)
    values["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    values["logit_bias"] = _logit_bias(fields.logit_bias)
    if words is not None:
        values["bad_words_token_ids"] += words.bad
        values["dry_sequence_breaker_ids"] = words.breakers
    return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs, structured=structured)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}.", "logit_bias"
        )
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise bad_request(
                f"logit_bias: keys must be token ids, got {shown(key)}.", "logit_bias"
            )
    return {int(key): value for key, value in bias.items()}


def _check_stream_options(fields: SamplingFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options needs stream to be true.", "stream_options")


def _check_stop(fields: SamplingFields, most: int) -> None:
    if fields.stopping_strings or fields.stop_sequence:
        most = LENIENT.max_stops  # SillyTavern's and TabbyAPI's names: who uses them has many
    stop = stop_strings(fields)
    if len(stop) > most:
        raise bad_request(f"stop may hold at most {most} strings, got {len(stop)}.", "stop")


def _check_cache_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise bad_request(
            f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {shown(salt)}.",
            "cache_salt",
        )


def _check_truncation(value: int, info: ModelInfo) -> None:
    if not (value == -1 or 1 <= value <= info.max_model_len):
        raise bad_request(
            f"truncate_prompt_tokens must be -1 or from 1 to {info.max_model_len}, got {value}.",
            "truncate_prompt_tokens",
        )


def check_logprobs(name: str, value: int | None) -> None:
    """Refuses a number of logprobs out of range, under the client's name for it."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise bad_request(f"{name} must be from 0 to {MAX_LOGPROBS}, got {value}.", name)


def check_count(fields: SamplingFields, num_prompts: int, limit: int) -> None:
    """Bounds prompts times ``n`` before anything is copied that often."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_N:
        raise bad_request(f"n must be an integer from 1 to {MAX_N}, got {n}.", "n")
    total = num_prompts * n
    if total > limit:
        param = "n" if num_prompts == 1 else "prompt"
        raise bad_request(f"Prompts times n may be at most {limit}, got {total}.", param)


def token_budget(
    prompts: list[Prompt], info: ModelInfo, asked: tuple[str, int | None], default: int | None
) -> int:
    """How many tokens may be generated: what was ``asked`` (field name, value), or ``default``.

    A default is cut to what the context leaves; ``None`` goes to its end. What the client asked for
    is never cut, but refused.

    Raises:
        ApiError: 400 ``context_length_exceeded``.
    """
    field, value = asked
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room = info.max_model_len - longest
    if value is None:
        return room if default is None else min(default, room)
    if value > room:
        raise bad_request(
            f"{field} is {value} and the prompt has {longest} tokens, but the context holds "
            f"{info.max_model_len} tokens in all. Ask for at most {room}.",
            field,
            "context_length_exceeded",
        )
    return value


def too_long(param: str, seen: str, info: ModelInfo) -> ApiError:
    """A 400 for a prompt that leaves no room for an answer."""
    return bad_request(
        f"The prompt has {seen}; the context holds {info.max_model_len} tokens, answer included.",
        param,
        "context_length_exceeded",
    )


def check_max_tokens(field: str, value: int | None, *, at_least: int) -> None:
    """Refuses a number of tokens below ``at_least``, under the client's name for it."""
    if value is not None and value < at_least:
        raise bad_request(f"{field} must be at least {at_least}, got {value}.", field)
