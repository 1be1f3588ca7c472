"""Ollama's API."""

from __future__ import annotations

from typing import Any

import msgspec

Frame = dict[str, Any]
"""One line of an answer."""


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call in an earlier turn; its arguments are an object."""

    function: dict[str, Any]


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What chats and continuations share. Streaming is the default."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """``/api/chat``."""

    messages: list[OllamaMessage] | None = None
    tools: list[Any] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """``/api/generate``."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Any = None
    images: list[Any] | None = None
    raw: bool | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """``/api/show``; ``name`` is the older word."""

    model: str | None = None
    name: str | None = None
