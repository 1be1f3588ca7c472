"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

import msgspec

from ingle_server.schemas.chat import ChatMessage, Tool


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a conversation; not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """The tokens; ``token_strs`` only when asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Their text."""

    prompt: str
