"""Words of a request as the token ids that samplers work on."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ingle_server.engine_client import EngineClient
from ingle_server.errors import bad_request, shown
from ingle_server.schemas.sampling import SamplingFields

MAX_WORDS = 128
MAX_WORD_CHARS = 200
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Token ids of ``bad_words`` and of ``dry_sequence_breakers``."""

    bad: tuple[tuple[int, ...], ...] = ()
    breakers: tuple[int, ...] = ()


def words_of(engine: EngineClient, fields: SamplingFields) -> Words:
    """The words' ids.

    A bad word is barred both at a text's beginning and after a space; a breaker is the last token
    of its text.

    Raises:
        ApiError: 400.
    """
    # A dict, because it keeps their order and drops what comes twice.
    bad: dict[tuple[int, ...], None] = {}
    for word in _checked("bad_words", fields.bad_words or ()):
        for text in (word, f" {word.lstrip()}"):
            bad[tuple(engine.encode(text, add_special_tokens=False))] = None
    breakers: tuple[int, ...] = ()
    if fields.dry_multiplier:
        texts = _checked("dry_sequence_breakers", _breakers(fields.dry_sequence_breakers))
        ids = (engine.encode(f"a{text}", add_special_tokens=False)[-1] for text in texts)
        breakers = tuple(dict.fromkeys(ids))
    return Words(bad=tuple(bad), breakers=breakers)


def _breakers(value: str | list[str] | None) -> list[str] | tuple[str, ...]:
    """A list, or the same as JSON in a string, as SillyTavern sends it, brackets or not."""
    if value is None:
        return DEFAULT_BREAKERS
    if isinstance(value, list):
        return value
    text = value if value.lstrip().startswith("[") else f"[{value}]"
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        raise bad_request(
            f"dry_sequence_breakers must be a list of texts, got {shown(value)}.",
            "dry_sequence_breakers",
        ) from None


def _checked(param: str, words: list[str] | tuple[str, ...]) -> list[str]:
    if len(words) > MAX_WORDS:
        raise bad_request(f"{param} may hold {MAX_WORDS} texts, got {len(words)}.", param)
    for word in words:
        if not 1 <= len(word) <= MAX_WORD_CHARS:
            raise bad_request(
                f"{param}: each text must have 1 to {MAX_WORD_CHARS} characters.", param
            )
    return list(words)
