"""From a request for a response to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingle_server.errors import bad_request, not_supported, shown
from ingle_server.responses.conversation import messages_of
from ingle_server.schemas.chat import ChatCompletionRequest, FunctionDefinition, Tool
from ingle_server.schemas.responses import Item, ResponsesRequest
from ingle_server.schemas.sampling import SamplingFields

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""A chat's fields and what they are called here, for errors."""
MAX_METADATA = 16
_INCLUDE_LOGPROBS = "message.output_text.logprobs"


def check_request(body: ResponsesRequest) -> None:
    """Refuses by name what is not served, and what is out of range.

    Raises:
        ApiError: 400.
    """
    if body.prompt is not None:
        raise not_supported("prompt", "A stored prompt template")
    if body.conversation is not None:
        raise not_supported("conversation", "A stored conversation")
    if body.truncation not in (None, "disabled", "auto"):
        raise bad_request(
            f"truncation must be auto or disabled, got {shown(body.truncation)}.", "truncation"
        )
    if body.background and body.stream:
        raise not_supported("background", "Streaming in the background")
    if body.background and body.store is False:
        raise bad_request("background needs store to be true.", "background")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_request(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}.",
            "max_output_tokens",
        )
    if len(body.metadata or ()) > MAX_METADATA:
        raise bad_request(f"metadata may hold at most {MAX_METADATA} pairs.", "metadata")
    for key, value in (body.metadata or {}).items():
        if not isinstance(value, str) or len(value) > 512 or len(key) > 64:
            raise bad_request(
                f"metadata.{shown(key)} must be a text of at most 512 characters.", "metadata"
            )


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the output's text comes with logprobs."""
    return bool(body.top_logprobs) or _INCLUDE_LOGPROBS in (body.include or ())


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """The chat that answers ``items``.

    Raises:
        ApiError: 400.
    """
    shared: dict[str, Any] = {
        name: getattr(body, name) for name in SamplingFields.__struct_fields__
    }
    shared |= {"n": None, "stream_options": None, "max_tokens": None}
    logprobs = wants_logprobs(body)
    return ChatCompletionRequest(
        **shared,
        messages=messages_of(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _tools(tools: list[dict[str, Any]] | None) -> list[Tool] | None:
    return None if tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], at: str) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise bad_request(f"{at}.type is {shown(kind)}, but only functions are served.", "tools")
    name, parameters = tool.get("name"), tool.get("parameters")
    description = tool.get("description")
    if not isinstance(name, str):
        raise bad_request(f"{at}.name must be a text, got {shown(name)}.", "tools")
    if not isinstance(parameters, dict | None):
        raise bad_request(f"{at}.parameters must be a JSON Schema object.", "tools")
    if not isinstance(description, str | None):
        raise bad_request(f"{at}.description must be a text.", "tools")
    strict = tool.get("strict")
    function = FunctionDefinition(
        name=name,
        description=description,
        parameters=parameters,
        strict=strict if isinstance(strict, bool) else None,
    )
    return Tool(type="function", function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        tools = [_tool_choice(t) for t in listed if isinstance(t, dict)] if listed else []
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": tools},
        }
    raise bad_request(f"tool_choice must name a function, got {shown(choice)}.", "tool_choice")


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = None if text is None else text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise bad_request(f"text.format must be an object, got {shown(form)}.", "text.format")
    if form.get("type") != "json_schema":
        return form
    return {
        "type": "json_schema",
        "json_schema": {key: form.get(key) for key in ("name", "description", "schema", "strict")},
    }
