"""Token counts of an answer."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens, those that came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """A prompt counts once, whatever ``n`` is; completions are summed over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
