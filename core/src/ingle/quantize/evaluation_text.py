"""The text models are compared over, cut into windows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingle.errors import ConfigError

if TYPE_CHECKING:
    from ingle.checkpoint.tokenizer import Tokenizer
    from ingle.quantize.evaluation import EvaluationConfig

OWN_TEXT: Final = "pydoc_data.topics"
"""Technical English that every Python installation brings along: about 700 kB."""
CHARACTERS_PER_TOKEN: Final = 16
"""More text than this per token wanted is not encoded at first."""


def text_source(path: str | None) -> str:
    """What the text is called in a report."""
    return OWN_TEXT if path is None else str(path)


def text_windows(config: EvaluationConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Windows of at most ``config.window`` tokens, each with the beginning-of-text token where the
    tokenizer puts one in front of texts. A last one that predicts nothing is left out.

    Raises:
        ConfigError: When the text cannot be read or is too short.
    """
    text = _read(config.text)
    start = _beginning(tokenizer)
    size = config.window - len(start)
    if size < 2 - len(start):
        raise ConfigError(f"--window {config.window} leaves no room for text.")
    ids = _encode(text, tokenizer, config.max_tokens)
    windows = [start + ids[i : i + size] for i in range(0, len(ids), size)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError(f"{text_source(config.text)} has {len(ids)} tokens; that is too short.")
    return windows


def _read(path: str | None) -> str:
    if path is None:
        from pydoc_data import topics

        return "\n".join(text for _, text in sorted(topics.topics.items()))
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read as UTF-8 text: {error}.") from None


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """[BOS] when the tokenizer begins texts with it, else []."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    begins = tokenizer.bos_token_id is not None and encoded[:1] == [tokenizer.bos_token_id]
    return encoded[:1] if begins else []


def _encode(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """The first ``max_tokens`` tokens, without encoding much more text than they need."""
    length = max_tokens * CHARACTERS_PER_TOKEN
    while True:
        ids = tokenizer.encode(text[:length], add_special_tokens=False, allow_special=False)
        if len(ids) >= max_tokens or length >= len(text):
            return ids[:max_tokens]
        length *= 4
