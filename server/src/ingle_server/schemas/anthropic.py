"""Anthropic's Messages API, as far as a model that reads and writes text can serve it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ingle_server.schemas.sampling import SamplingFields

Block = dict[str, Any]
"""One block of content, as it goes over the wire."""


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: str
    content: str | list[Block]


class MessagesRequest(SamplingFields, kw_only=True):
    """The request. vLLM's and Aphrodite's samplers may be given too.

    ``max_tokens`` is required, but not for counting.
    """

    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts; ``input_tokens`` leaves out what the prefix cache had."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageObject(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, kw_only=True):
    """What counting gives."""

    input_tokens: int
