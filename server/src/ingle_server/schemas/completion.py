"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ingle_server.schemas.sampling import PromptLogprobs, SamplingFields
from ingle_server.schemas.timings import Timings
from ingle_server.schemas.usage import Usage

UNNAMED = "\0"
"""Stands for a ``model`` that was left out; the empty name is a name, and served by nobody."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The request. A mixed list of strings and ids gets through here and is refused later.

    ``model`` is required; only SillyTavern, which says so by ``api_type``, leaves it out where it
    talks to a server of one model.
    """

    model: str = UNNAMED
    api_type: str | None = None
    prompt: str | list[str | int | list[int]] | None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists of equal length, one entry per token.

    Attributes:
        tokens: The tokens' text.
        token_logprobs: Natural logarithms.
        top_logprobs: The likeliest tokens by text, and the sampled one.
        text_offset: Characters from the start of ``text``, echoed prompt included.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer, and every chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
