"""Chat messages in the form templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ingle.errors import RequestError

_ROLES: Final = {"developer": "system"}
_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal"}


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], parts_wanted: bool = False
) -> list[dict[str, Any]]:
    """Copies of ``messages`` as templates know them.

    ``developer`` becomes ``system``; keys whose value is null are left out, but content is never
    missing; text parts are joined by newlines; arguments of tool calls, JSON in a string on the
    wire, become objects.

    Args:
        messages: As the client sent them, parsed.
        parts_wanted: The template walks over content parts itself: text becomes one part.

    Raises:
        RequestError: Naming the message, when it has no role or a part that is no text.
    """
    if not messages:
        raise RequestError("messages must hold at least one message.", param="messages")
    return [_normalize(index, raw, parts_wanted) for index, raw in enumerate(messages)]


def _normalize(index: int, raw: Mapping[str, Any], parts_wanted: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    message = {key: value for key, value in raw.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string.", param=f"{where}.role")
    message["role"] = _ROLES.get(role, role)
    text = _content_text(where, message.get("content", ""))
    message["content"] = [{"type": "text", "text": text}] if parts_wanted else text
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _content_text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content must be a string or a list of parts.", param=f"{where}.content"
        )
    return "\n".join(
        _part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content)
    )


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where}.type must be text, got {str(kind)[:40]!r}; this model reads text only.",
            param=f"{where}.type",
        )
    key = _TEXT_PARTS[kind]
    text = part.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{key} must be a string.", param=f"{where}.{key}")
    return text


def _with_parsed_arguments(call: Any) -> Any:
    """The call with its arguments as an object; left as sent when they are no JSON object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return call
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}
