"""From the items of a conversation to the messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ingle_server.errors import bad_request, not_supported, shown
from ingle_server.schemas.chat import ChatMessage, FunctionCall, ToolCall
from ingle_server.schemas.responses import Item

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")
MAX_ITEMS = 10_000


def input_items(given: str | list[Item]) -> list[Item]:
    """What the client sent as items that have ids, as they are kept and listed.

    Raises:
        ApiError: 400 naming the item and what is wrong with it.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise bad_request("input must hold at least one item.", "input")
    if len(given) > MAX_ITEMS:
        raise bad_request(f"input may hold at most {MAX_ITEMS} items, got {len(given)}.", "input")
    return [_item(item, f"input[{i}]") for i, item in enumerate(given)]


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
    """The conversation as a chat: calls join the assistant's turn that they follow."""
    messages = []
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    for item in items:
        kind = item["type"]
        if kind == "message":
            messages.append(ChatMessage(role=item["role"], content=_text(item["content"])))
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            text = item["output"] if isinstance(item["output"], str) else _text(item["output"])
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=item["call_id"]))
    return messages


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _add_call(messages: list[ChatMessage], item: Item) -> None:
    function = FunctionCall(name=item["name"], arguments=item["arguments"])
    call = ToolCall(id=item["call_id"], type="function", function=function)
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", tool_calls=[]))
    last = messages[-1]
    last.tool_calls = [*(last.tool_calls or ()), call]


def _text(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(part.get("text", part.get("refusal", ""))) for part in parts)


def _item(item: Item, at: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            return _message(item, at)
        case "function_call":
            kept = {key: _string(item, key, at) for key in ("call_id", "name", "arguments")}
            kept["arguments"] = _arguments(kept["arguments"], at)
            return {"type": kind, "id": _id(item, "fc"), **kept, "status": "completed"}
        case "function_call_output":
            call_id = _string(item, "call_id", at)
            output = item.get("output")
            if not isinstance(output, str):
                output = _content(output, f"{at}.output", "input_text")
            return {"type": kind, "id": _id(item, "fco"), "call_id": call_id, "output": output}
        case "reasoning":
            # Thoughts of earlier turns are not shown to the model again.
            return {"type": kind, "id": _id(item, "rs"), "summary": item.get("summary") or []}
        case None | "":
            raise bad_request(f"{at}.type is required.", "input")
    raise not_supported("input", f"{at}: an item of type {shown(kind)}")


def _message(item: Item, at: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(
            f"{at}.role must be one of {', '.join(_ROLES)}; got {shown(role)}.", "input"
        )
    part_type = "output_text" if role == "assistant" else "input_text"
    content = _content(item.get("content"), f"{at}.content", part_type)
    return {
        "type": "message",
        "id": _id(item, "msg"),
        "status": "completed",
        "role": role,
        "content": content,
    }


def _content(content: Any, at: str, part_type: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(part_type, content)]
    if not isinstance(content, list) or not content:
        raise bad_request(f"{at} must be a text or a list of parts, got {shown(content)}.", "input")
    return [_part(part, f"{at}[{i}]", part_type) for i, part in enumerate(content)]


def _part(part: Any, at: str, part_type: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    if kind not in _TEXT_PARTS:
        raise bad_request(
            f"{at}.type is {shown(kind)}, but the model reads text only (input_text).", "input"
        )
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{at}.text must be a text, got {shown(part.get('text'))}.", "input")
    return _text_part(part_type, part["text"])


def _text_part(part_type: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": part_type, "text": text}
    if part_type == "output_text":
        part["annotations"] = []
    return part


def _id(item: Item, prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 128 else new_id(prefix)


def _string(item: Item, key: str, at: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{at}.{key} must be a text, got {shown(value)}.", "input")
    return value


def _arguments(text: str, at: str) -> str:
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(
            f"{at}.arguments must be a JSON object in a text, got {shown(text)}.", "input"
        ) from None
    return text or "{}"
