"""From Ollama's requests to chats and completions."""

from __future__ import annotations

from typing import Any

import msgspec

from ingle_server.errors import ApiError, bad_request, not_supported, shorten, shown
from ingle_server.model_entry import ModelEntry
from ingle_server.schemas.chat import ChatCompletionRequest, ChatMessage, FunctionCall, ToolCall
from ingle_server.schemas.chat import Tool as ChatTool
from ingle_server.schemas.completion import CompletionRequest
from ingle_server.schemas.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)
from ingle_server.schemas.sampling import SamplingFields
from ingle_server.service import Service

_OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "tfs_z": "tfs",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mirostat": "mirostat_mode",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "repeat_last_n": "penalty_range",
}
"""Ollama's options and what they are called here; others (num_ctx, num_gpu …) change nothing."""
OPTION_NAMES = {ours: theirs for theirs, ours in _OPTIONS.items() if ours != theirs} | {
    "max_completion_tokens": "num_predict",
    "response_format": "format",
}


def model_name(service: Service, name: str) -> str:
    """The name served; ``:latest`` may stand behind it.

    Raises:
        ApiError: 404 when it is no model's, or that of one that is not loaded.
    """
    short = name.removesuffix(":latest")
    name = short if service.models.find(short) else name
    service.check_model(name)
    return name


def find_entry(service: Service, name: str) -> ModelEntry:
    """The model of that name, wherever it is.

    Raises:
        ApiError: 404 when there is none.
    """
    models = service.models
    entry = models.find(name.removesuffix(":latest")) or models.find(name)
    if entry is None:
        raise ApiError(404, f"The model `{shorten(name)}` does not exist; GET /api/tags lists all.")
    return entry


def chat_request(model: str, body: OllamaChatRequest) -> ChatCompletionRequest:
    """The chat that answers ``body``.

    Raises:
        ApiError: 400.
    """
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(body.messages or ())]
    return _chat(model, body, messages, _tools(body.tools))


def generate_as_chat(model: str, body: OllamaGenerateRequest) -> ChatCompletionRequest:
    """A prompt as the one turn of a chat, in the model's own template.

    Raises:
        ApiError: 400.
    """
    messages = [ChatMessage(role="system", content=body.system)] if body.system else []
    messages.append(ChatMessage(role="user", content=body.prompt))
    return _chat(model, body, messages, None)


def raw_completion(model: str, body: OllamaGenerateRequest) -> CompletionRequest:
    """A prompt without any template.

    Raises:
        ApiError: 400.
    """
    fields = _sampling(body.options)
    max_tokens = fields.pop("max_tokens", None)
    return CompletionRequest(
        model=model,
        prompt=body.prompt,
        stream=body.stream,
        max_tokens=2**31 if max_tokens is None else max_tokens,
        structured_outputs=None,
        guided_json=_schema(body.format),
        **fields,
    )


def check_generate(body: OllamaGenerateRequest) -> None:
    """Refuses by name what is not served.

    Raises:
        ApiError: 400.
    """
    if body.images:
        raise bad_request("images are refused: the model reads text only.", "images")
    if body.template:
        raise bad_request("template is refused: the server uses the model's own.", "template")
    if body.suffix:
        raise not_supported("suffix", "Inserting between prompt and suffix")


def _chat(
    model: str,
    body: OllamaRequest,
    messages: list[ChatMessage],
    tools: list[ChatTool] | None,
) -> ChatCompletionRequest:
    schema = _schema(body.format)
    kwargs = None if body.think is None else {"enable_thinking": bool(body.think)}
    return ChatCompletionRequest(
        model=model,
        messages=messages,
        stream=body.stream,
        tools=tools,
        guided_json=schema,
        chat_template_kwargs=kwargs,
        **_sampling(body.options),
    )


def _schema(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form == "":
        return None
    if form == "json":
        return {"type": "object"}
    if isinstance(form, str):
        raise bad_request(f"format must be json or a JSON Schema, got {shown(form)}.", "format")
    return form


def _sampling(options: dict[str, Any] | None) -> dict[str, Any]:
    """The options' fields, their types checked."""
    given = {
        ours: options[theirs]
        for theirs, ours in _OPTIONS.items()
        if options and options.get(theirs) is not None
    }
    if given.get("max_tokens") in (-1, -2):  # to the end of the context
        del given["max_tokens"]
    if given.get("mirostat_mode") == 1:
        given["mirostat_mode"] = 2
    try:
        fields = msgspec.convert({"model": "", **given}, SamplingFields)
    except msgspec.ValidationError as error:
        raise bad_request(f"options: {str(error).replace('`', '')}.", "options") from None
    return {name: getattr(fields, name) for name in given}


def _message(message: OllamaMessage, at: str) -> ChatMessage:
    if message.images:
        raise bad_request(f"{at}.images is refused: the model reads text only.", f"{at}.images")
    calls = [_call(call.function, f"{at}.tool_calls") for call in message.tool_calls or ()]
    return ChatMessage(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        tool_calls=calls or None,
    )


def _call(function: dict[str, Any], at: str) -> ToolCall:
    name, arguments = function.get("name"), function.get("arguments") or {}
    if not isinstance(name, str):
        raise bad_request(f"{at}: function.name must be a text, got {shown(name)}.", at)
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(type="function", function=FunctionCall(name=name, arguments=text))


def _tools(tools: list[Any] | None) -> list[ChatTool] | None:
    try:
        return None if not tools else msgspec.convert(tools, list[ChatTool])
    except msgspec.ValidationError as error:
        raise bad_request(f"tools: {str(error).replace('`', '')}.", "tools") from None
