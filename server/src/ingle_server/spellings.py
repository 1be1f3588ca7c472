"""Fields as TabbyAPI, Aphrodite, KoboldCpp and SillyTavern spell them, as Ingle's own values."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ingle.sampler_order import read_kobold_order
from ingle_server.engine_client import ModelInfo
from ingle_server.errors import bad_request, shown
from ingle_server.schemas.sampling import SamplingFields

MAX_BANNED_IDS: Final = 4096
ALIASES: Final = (
    ("typical", "typical_p"),
    ("top_n_sigma", "nsigma"),
    ("dynatemp_low", "dynatemp_min"),
    ("min_temp", "dynatemp_min"),
    ("dynatemp_high", "dynatemp_max"),
    ("max_temp", "dynatemp_max"),
    ("temp_exponent", "dynatemp_exponent"),
    ("dry_penalty_last_n", "dry_range"),
    ("rep_pen", "repetition_penalty"),
    ("ban_eos_token", "ignore_eos"),
)
"""(other engines' name, ours); ours wins when both are given."""
_RANGES: Final = ("penalty_range", "repetition_penalty_range", "repetition_range", "rep_pen_range")


def spelled_values(fields: SamplingFields, info: ModelInfo) -> dict[str, Any]:
    """What ``SamplingParams`` is given for fields that go by several names or forms.

    Raises:
        ApiError: 400, under the name the client used.
    """
    values: dict[str, Any] = {
        name: getattr(fields, alias)
        for alias, name in ALIASES
        if getattr(fields, alias) is not None
    }
    values["banned_strings"] = banned_strings(fields.banned_strings)
    values["bad_words_token_ids"] = _banned_ids(fields, info)
    values["sampler_priority"] = _priority(fields)
    values["repetition_penalty_range"] = _penalty_range(fields)
    if fields.allowed_tokens:
        ids = _ids("allowed_tokens", fields.allowed_tokens, info)
        values["allowed_token_ids"] = ids or None
    return values


def banned_strings(value: str | list[str] | None) -> tuple[str, ...]:
    """The texts, each once; empty ones, as an empty line of a form gives, ban nothing."""
    texts = [value] if isinstance(value, str) else value or []
    return tuple(dict.fromkeys(text for text in texts if text))


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    """Every stop string, under whichever name."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    more = [
        text
        for value in (fields.stop_sequence, fields.stopping_strings)
        for text in ([value] if isinstance(value, str) else value or ())
        if text
    ]
    # SillyTavern sends the same list under two names.
    return tuple(dict.fromkeys([*stop, *more])) if more else tuple(stop)


def _banned_ids(fields: SamplingFields, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Each as a bad word of one token."""
    ids = [
        *_ids("custom_token_bans", fields.custom_token_bans, info),
        *_ids("banned_tokens", fields.banned_tokens, info),
    ]
    return tuple((token_id,) for token_id in dict.fromkeys(ids))


def _ids(name: str, value: str | list[int] | None, info: ModelInfo) -> list[int]:
    """Token ids as a list, or as ``1, 2``, as forms give them."""
    listed = value if isinstance(value, list) else _split(name, value or "")
    if len(listed) > MAX_BANNED_IDS:
        raise bad_request(f"{name} may hold {MAX_BANNED_IDS} ids, got {len(listed)}.", name)
    for token_id in listed:
        if not 0 <= token_id < info.vocab_size:
            raise bad_request(
                f"{name} must hold ids from 0 to {info.vocab_size - 1}, got {shown(token_id)}.",
                name,
            )
    return listed


def _split(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.strip("[] ").split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 10 for part in parts):
        raise bad_request(f"{name} must be ids with commas between, got {shown(text)}.", name)
    return [int(part) for part in parts]


def _priority(fields: SamplingFields) -> tuple[str | int, ...]:
    if fields.sampler_priority:
        value = fields.sampler_priority
        return tuple(_names(value) if isinstance(value, str) else value)
    if not fields.sampler_order:
        return ()
    try:
        return read_kobold_order(fields.sampler_order)
    except ValueError as error:
        raise bad_request(f"sampler_order: {error}.", "sampler_order") from None


def _names(text: str) -> list[str | int]:
    """Names in a text: as JSON, or with commas or line ends between."""
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str | int])
        except msgspec.DecodeError:
            said = "a list of names or numbers"
            raise bad_request(
                f"sampler_priority must be {said}, got {shown(text)}.", "sampler_priority"
            ) from None
    return [name for name in text.replace("\n", ",").split(",") if name.strip()]


def _penalty_range(fields: SamplingFields) -> int:
    """0 and below look at everything."""
    given = [value for name in _RANGES if (value := getattr(fields, name)) is not None]
    return max(0, given[0]) if given else 0
