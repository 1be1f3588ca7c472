"""From the client's messages to what chat templates understand; nothing is ever fetched."""

from __future__ import annotations

import re
from typing import Any

from ingle_server.errors import bad_request, not_supported, shown
from ingle_server.schemas.chat import ChatMessage, ContentPart, Tool, ToolCall

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Client roles and what templates know: ``developer`` is the newer name of ``system``."""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MEDIA = ("image_url", "input_audio", "file", "video_url", "audio_url", "image", "input_image")


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as a template sees it: every ``content`` is a string.

    Raises:
        ApiError: 400 naming the message and its part.
    """
    if not messages:
        raise bad_request("messages must hold at least one message.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, at: str) -> dict[str, Any]:
    if message.role not in ROLES:
        allowed = ", ".join(ROLES)
        raise bad_request(
            f"{at}.role must be one of {allowed}; got {shown(message.role)}.", f"{at}.role"
        )
    result: dict[str, Any] = {"role": ROLES[message.role], "content": _content(message, at)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    calls = _calls(message)
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _calls(message: ChatMessage) -> list[ToolCall]:
    """What the turn called, in whichever of the two forms."""
    if message.tool_calls or message.function_call is None:
        return message.tool_calls or []
    return [ToolCall(function=message.function_call)]


def _content(message: ChatMessage, at: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        # Templates that join strings must see "" where the turn was only a call or a refusal.
        if message.role == "assistant" and (_calls(message) or message.refusal is not None):
            return message.refusal or ""
        raise bad_request(f"{at}.content is required.", f"{at}.content")
    if not content:
        raise bad_request(f"{at}.content must not be an empty list.", f"{at}.content")
    return "\n".join(_part(part, f"{at}.content[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, at: str) -> str:
    if part.type in _MEDIA:
        raise bad_request(
            f"{at}.type is {shown(part.type)}, but the model reads text only.", f"{at}.type"
        )
    if part.type not in ("text", "refusal"):
        raise bad_request(f"{at}.type must be text, got {shown(part.type)}.", f"{at}.type")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise bad_request(f"{at}.{part.type} is required.", f"{at}.{part.type}")
    return text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
    return {"id": call.id, "type": "function", "function": function}


def check_tools(tools: list[Tool] | None) -> None:
    """Refuses tools that are not functions, or badly named.

    Raises:
        ApiError: 400 with param ``tools``.
    """
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        if tool.type == "custom":
            raise not_supported("tools", f"{at}: a custom tool")
        if tool.type != "function":
            raise bad_request(f"{at}.type must be function, got {shown(tool.type)}.", "tools")
        if tool.function is None:
            raise bad_request(f"{at}.function is required.", "tools")
        name = tool.function.name
        if not _TOOL_NAME.fullmatch(name):
            raise bad_request(
                f"{at}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -; got {shown(name)}.",
                "tools",
            )
