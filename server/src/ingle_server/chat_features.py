"""What a chat may ask beyond text: checked in full, refused by name where not served yet."""

from __future__ import annotations

from typing import Any

from ingle_server.errors import bad_request, not_supported, shown
from ingle_server.messages import check_tools
from ingle_server.schemas.chat import ChatCompletionRequest, Tool

_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that the engine passes to the template itself; a client must not override them."""


def check_features(request: ChatCompletionRequest) -> None:
    """Checks tools, response format, modalities and template options.

    Raises:
        ApiError: 400.
    """
    check_tools(request.tools)
    _check_tool_choice(request.tool_choice, request.tools)
    check_response_format(request.response_format)
    check_template(request.chat_template, request.chat_template_kwargs)
    if request.add_generation_prompt and request.continue_final_message:
        raise bad_request(
            "continue_final_message and add_generation_prompt cannot both be true.",
            "continue_final_message",
        )
    if request.audio is not None or "audio" in (request.modalities or ()):
        raise not_supported("modalities" if request.audio is None else "audio", "Audio")
    if request.web_search_options is not None:
        raise not_supported("web_search_options", "Web search")
    if request.echo:
        raise not_supported("echo", "Echo in a chat")
    if request.documents:
        raise not_supported("documents", "Passing documents to the template")


def served_tools(request: ChatCompletionRequest) -> list[Tool] | None:
    """The tools that the template is shown."""
    return None if request.tool_choice == "none" else request.tools or None


def check_template(template: str | None, kwargs: dict[str, Any] | None) -> None:
    """Refuses templates from clients, and variables that would override the engine's own."""
    if template is not None:
        raise bad_request(
            "chat_template is refused: the server uses the model's own template only.",
            "chat_template",
        )
    taken = sorted(_RESERVED_KWARGS.intersection(kwargs or ()))
    if taken:
        raise bad_request(
            f"chat_template_kwargs must not set {', '.join(taken)}: the server does.",
            "chat_template_kwargs",
        )


def _check_tool_choice(choice: str | dict[str, Any] | None, tools: list[Tool] | None) -> None:
    if choice is None or choice == "none" or (choice == "auto" and tools is not None):
        return
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise bad_request(
            f"tool_choice must be none, auto, required or a tool; got {shown(choice)}.",
            "tool_choice",
        )
    if not tools:
        raise bad_request("tool_choice needs tools.", "tool_choice")
    if isinstance(choice, dict):
        _check_choice_object(choice, tools)


def _check_choice_object(choice: dict[str, Any], tools: list[Tool]) -> None:
    if choice.get("type") != "allowed_tools":
        _check_named(choice, tools)
        return
    allowed = choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(listed, list) or not listed:
        raise bad_request(
            f"tool_choice.allowed_tools must list tools, got {shown(choice)}.", "tool_choice"
        )
    if allowed.get("mode") not in (None, "auto", "required"):
        raise bad_request(
            f"tool_choice.allowed_tools.mode must be auto or required, got "
            f"{shown(allowed.get('mode'))}.",
            "tool_choice",
        )
    for tool in listed:
        _check_named(tool if isinstance(tool, dict) else {}, tools)


def _check_named(choice: dict[str, Any], tools: list[Tool]) -> None:
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"tool_choice must name a function, got {shown(choice)}.", "tool_choice")
    names = {tool.function.name for tool in tools if tool.function is not None}
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        raise bad_request(
            f"tool_choice names no tool of this request: {shown(name)}.", "tool_choice"
        )


def check_response_format(value: dict[str, Any] | None) -> None:
    """Refuses forms of an answer that are not known, or lack what they need."""
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise bad_request(
            f"response_format.type must be text, json_object or json_schema; got {shown(kind)}.",
            "response_format",
        )
    if kind == "json_schema":
        _check_json_schema(value.get("json_schema"))


def _check_json_schema(value: Any) -> None:
    name = "response_format"
    if not isinstance(value, dict):
        raise bad_request(f"{name}.json_schema must be an object, got {shown(value)}.", name)
    if not isinstance(value.get("name"), str):
        raise bad_request(f"{name}.json_schema.name is required and must be a string.", name)
    if not isinstance(value.get("schema"), dict):
        raise bad_request(f"{name}.json_schema.schema must be a JSON Schema object.", name)
