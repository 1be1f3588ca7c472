"""From Kobold's request to a completion."""

from __future__ import annotations

from typing import Any

from ingle_server.engine_client import ModelInfo
from ingle_server.errors import bad_request
from ingle_server.schemas.completion import CompletionRequest
from ingle_server.schemas.kobold import KoboldRequest

DEFAULT_LENGTH = 256
MAX_TEMPERATURE = 2.0
"""Kobold's sliders go further, where text is noise already."""

_COPIED = (
    "n",
    "top_p",
    "top_a",
    "min_p",
    "tfs",
    "nsigma",
    "presence_penalty",
    "dynatemp_exponent",
    "smoothing_factor",
    "smoothing_curve",
    "mirostat_tau",
    "mirostat_eta",
    "xtc_threshold",
    "xtc_probability",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_sequence_breakers",
    "dry_penalty_last_n",
    "logit_bias",
    "sampler_order",
    "rep_pen_range",
    "custom_token_bans",
)
FIELD_NAMES = {
    "max_tokens": "max_length",
    "repetition_penalty": "rep_pen",
    "stop": "stop_sequence",
    "seed": "sampler_seed",
    "typical_p": "typical",
    "mirostat_mode": "mirostat",
    "guided_grammar": "grammar",
}
"""A completion's fields and what they are called here, for errors."""


def completion_request(body: KoboldRequest, model: str, info: ModelInfo) -> CompletionRequest:
    """The completion that ``body`` asks for. A prompt too long loses its beginning.

    Raises:
        ApiError: 400.
    """
    if body.images:
        raise bad_request("images are refused: the model reads text only.", "images")
    if body.max_length is not None and body.max_length < 1:
        raise bad_request(f"max_length must be at least 1, got {body.max_length}.", "max_length")
    length = body.max_length or DEFAULT_LENGTH
    context = min(body.max_context_length or info.max_model_len, info.max_model_len)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _COPIED} | _dynamic(body)
    return CompletionRequest(
        model=model,
        prompt=(body.memory or "") + body.prompt,
        max_tokens=length,
        truncate_prompt_tokens=max(1, context - min(length, context - 1)),
        stop=[text for text in body.stop_sequence or () if text] or None,
        seed=None if body.sampler_seed in (None, -1) else body.sampler_seed,
        temperature=_temperature(body.temperature),
        typical_p=body.typical,
        top_k=body.top_k,
        repetition_penalty=body.rep_pen,
        mirostat_mode=2 if body.mirostat == 1 else body.mirostat,
        ignore_eos=body.ignore_eos or body.ban_eos_token or None,
        include_stop_str_in_output=None if body.trim_stop is None else not body.trim_stop,
        skip_special_tokens=None if body.render_special is None else not body.render_special,
        guided_grammar=body.grammar or None,
        banned_strings=body.banned_strings if body.banned_tokens is None else body.banned_tokens,
        **fields,
    )


def _temperature(value: float | None) -> float | None:
    return value if value is None else min(value, MAX_TEMPERATURE)


def _dynamic(body: KoboldRequest) -> dict[str, Any]:
    """The temperature's range around its middle."""
    if not body.dynatemp_range:
        return {}
    middle = 1.0 if body.temperature is None else body.temperature
    return {
        "dynatemp_min": max(0.0, middle - body.dynatemp_range),
        "dynatemp_max": min(MAX_TEMPERATURE, middle + body.dynatemp_range),
    }
