"""From Anthropic's request to a chat."""

from __future__ import annotations

from typing import Any

import msgspec

from ingle_server.errors import bad_request, shown
from ingle_server.schemas.anthropic import AnthropicMessage, Block, MessagesRequest
from ingle_server.schemas.chat import (
    ChatCompletionRequest,
    ChatMessage,
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCall,
)
from ingle_server.schemas.sampling import SamplingFields

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
"""A chat's fields and what they are called here, for errors."""
_FORGOTTEN = ("thinking", "redacted_thinking")
"""Blocks of earlier turns that the model is not shown again."""


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """The chat that answers ``body``.

    Raises:
        ApiError: 400.
    """
    if not body.messages:
        raise bad_request("messages must hold at least one message.", "messages")
    shared: dict[str, Any] = {
        name: getattr(body, name) for name in SamplingFields.__struct_fields__
    }
    shared |= {"n": None, "stream_options": None, "max_tokens": None}
    shared["stop"] = body.stop_sequences or body.stop
    messages = [] if body.system is None else [ChatMessage(role="system", content=_system(body))]
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    # A last turn of the assistant is the beginning of its answer.
    continues = body.messages[-1].role == "assistant"
    choice = body.tool_choice or {}
    return ChatCompletionRequest(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_tokens,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
        response_format=_response_format(body.output_config),
        continue_final_message=continues or None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _system(body: MessagesRequest) -> str:
    if isinstance(body.system, str):
        return body.system
    return "\n".join(_text(block, f"system[{i}]") for i, block in enumerate(body.system or ()))


def _messages(message: AnthropicMessage, at: str) -> list[ChatMessage]:
    """One turn; results of tools become turns of their own, before the user's text."""
    if message.role not in ("user", "assistant", "system"):
        raise bad_request(
            f"{at}.role must be user or assistant, got {shown(message.role)}.", f"{at}.role"
        )
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    texts: list[str] = []
    results: list[ChatMessage] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(message.content):
        place = f"{at}.content[{i}]"
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, place))
        elif kind == "tool_result":
            results.append(_result(block, place))
        elif kind not in _FORGOTTEN:
            texts.append(_text(block, place))
    if calls or message.role == "assistant":
        text = "\n".join(texts)
        return [ChatMessage(role=message.role, content=text, tool_calls=calls or None)]
    if not texts and not results:
        raise bad_request(f"{at}.content must not be empty.", f"{at}.content")
    said = [ChatMessage(role=message.role, content="\n".join(texts))] if texts else []
    return results + said


def _text(block: Block, at: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise bad_request(
            f"{at}.type is {shown(kind)}, but the model reads text only.", f"{at}.type"
        )
    return _string(block, "text", at)


def _call(block: Block, at: str) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_request(f"{at}.input must be an object, got {shown(arguments)}.", f"{at}.input")
    function = FunctionCall(
        name=_string(block, "name", at), arguments=msgspec.json.encode(arguments).decode()
    )
    return ToolCall(id=_string(block, "id", at), type="function", function=function)


def _result(block: Block, at: str) -> ChatMessage:
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(
            _text(part if isinstance(part, dict) else {}, f"{at}.content[{i}]")
            for i, part in enumerate(content)
        )
    if not isinstance(content, str | None):
        raise bad_request(
            f"{at}.content must be a text or a list of blocks, got {shown(content)}.",
            f"{at}.content",
        )
    call_id = _string(block, "tool_use_id", at)
    return ChatMessage(role="tool", content=content or "", tool_call_id=call_id)


def _tools(tools: list[dict[str, Any]] | None) -> list[Tool] | None:
    return None if tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], at: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(
            f"{at}.type is {shown(tool['type'])}; this server has no tools of its own.", "tools"
        )
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict):
        raise bad_request(f"{at}.input_schema must be a JSON Schema object.", "tools")
    if not isinstance(description, str | None):
        raise bad_request(f"{at}.description must be a text.", "tools")
    name = tool.get("name")
    if not isinstance(name, str):
        raise bad_request(f"{at}.name must be a text, got {shown(name)}.", "tools")
    function = FunctionDefinition(name=name, description=description, parameters=schema)
    return Tool(type="function", function=function)


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    match None if choice is None else choice.get("type"):
        case None if choice is None:
            return None
        case "auto" | "none" as kind:
            return str(kind)
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": (choice or {}).get("name")}}
    raise bad_request(
        f"tool_choice.type must be auto, any, tool or none; got {shown(choice)}.", "tool_choice"
    )


def _response_format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    form = None if config is None else config.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise bad_request(
            f"output_config.format.type must be json_schema, got {shown(form)}.", "output_config"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


def _string(block: Block, key: str, at: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{at}.{key} must be a text, got {shown(value)}.", f"{at}.{key}")
    return value
