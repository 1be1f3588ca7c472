"""One chat from its fields to a generation under way: what every door to chats calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ingle import SamplingParams
from ingle_server.chat_features import check_features, served_tools
from ingle_server.engine_client import ChatPrompt
from ingle_server.errors import bad_request
from ingle_server.flight import Arrival, Flight
from ingle_server.messages import template_messages
from ingle_server.outputs import Collected, Finish, UsageCounter, finish_of
from ingle_server.prompts import render_chat
from ingle_server.schemas.chat import ChatCompletionRequest
from ingle_server.service import Service
from ingle_server.structured import Wanted, check_grammar, wanted_output
from ingle_server.tools.answer import AnswerReader
from ingle_server.tools.pieces import Piece
from ingle_server.tools.plan import ToolPlan, tool_plan
from ingle_server.translate import (
    STRICT,
    Limits,
    check_count,
    check_fields,
    check_logprobs,
    check_max_tokens,
    sampling_params,
    token_budget,
)
from ingle_server.words import words_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A chat that is generating.

    Attributes:
        flight: Its generation; whoever began it must ``land`` it.
        new_reader: Makes the reader of one choice's text.
    """

    flight: Flight
    new_reader: Callable[[], AnswerReader]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """Why an answer ended.

    Attributes:
        reason: ``tool_calls`` when it ended by itself and holds calls.
        stop_reason: The stop string or stop token that fired, if one did.
    """

    reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class AnswerFollower:
    """Reads the one choice of a chat as it comes, and counts its tokens."""

    def __init__(self, call: ChatCall) -> None:
        self.usage = UsageCounter(call.flight.num_prompt_tokens)
        self._reader = call.new_reader()

    def follow(self, arrival: Arrival) -> tuple[list[Piece], AnswerEnd | None]:
        """What is new, and the end when it has come."""
        self.usage.saw(arrival)
        pieces: list[Piece] = []
        end = None
        for output in arrival.output.outputs:
            reason = finish_of(output)
            pieces += self._reader.push(output.text)
            if reason is not None:
                pieces += self._reader.finish()
                end = self._end(reason, output.stop_reason)
        return pieces, end

    def whole(self, collected: Collected) -> tuple[list[Piece], AnswerEnd]:
        """All of an answer that was collected (its tokens counted by ``usage``)."""
        pieces = self._reader.push(collected.text) + self._reader.finish()
        return pieces, self._end(collected.finish_reason, collected.stop_reason)

    def _end(self, reason: Finish, stop_reason: str | int | None) -> AnswerEnd:
        calls = reason == "stop" and self._reader.ends_with_calls
        return AnswerEnd(reason="tool_calls" if calls else reason, stop_reason=stop_reason)


async def begin_chat(
    service: Service, body: ChatCompletionRequest, prefix: str, limits: Limits = STRICT
) -> ChatCall:
    """Checks a chat in full and starts it; its id begins with ``prefix``.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    chat = check_chat(service, body, limits)
    plan = tool_plan(body)
    wanted = plan.wanted or wanted_output(body, body.response_format)
    await check_grammar(service.engine, wanted)
    prompt = await render_chat(service, chat, body, asked_tokens(body)[1])
    asked = asked_tokens(body)
    default = limits.default(asked, None)
    max_tokens = token_budget([prompt], service.engine.info, limits.cut(asked), default)
    params = _params(service, body, plan, wanted, max_tokens)
    return ChatCall(
        flight=service.take_off(prefix, [prompt], params),
        new_reader=service.reading.reader_factory(plan, prompt.token_ids),
    )


async def count_chat_tokens(service: Service, body: ChatCompletionRequest) -> int:
    """Tokens of a chat's prompt, checked in full and not begun.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    prompt = await render_chat(service, check_chat(service, body), body, None)
    return len(prompt.token_ids)


def check_chat(
    service: Service, body: ChatCompletionRequest, limits: Limits = STRICT
) -> ChatPrompt:
    """Checks every field, and gives the conversation to render.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    service.check_model(body.model)
    service.check_alive()
    field, asked = asked_tokens(body)
    check_max_tokens(field, asked, at_least=1)
    check_count(body, 1, service.config.max_prompts)
    check_fields(body, service.engine.info, limits)
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    check_features(body)
    messages = template_messages(body.messages)
    if not service.engine.info.has_chat_template:
        raise bad_request("The model has no chat template; use /v1/completions.", "messages")
    served = served_tools(body)
    tools = None if served is None else msgspec.to_builtins(served)
    return ChatPrompt(
        messages=messages if tools is None else service.reading.with_tools(messages, tools),
        tools=tools,
        add_generation_prompt=generation_prompt(
            body.add_generation_prompt, body.continue_final_message
        ),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


def generation_prompt(asked: bool | None, continue_final_message: bool | None) -> bool:
    """Whether to open the assistant's turn: as asked, else unless the last one is to go on."""
    return not continue_final_message if asked is None else asked


def asked_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """(field, value) of the limit that counts: the newer name wins."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _params(
    service: Service,
    body: ChatCompletionRequest,
    plan: ToolPlan,
    wanted: Wanted | None,
    max_tokens: int,
) -> SamplingParams:
    params = sampling_params(
        body,
        service.engine.info,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=None if wanted is None else wanted.grammar,
        words=words_of(service.engine, body),
    )
    if service.reading.needs_special_tokens(plan):
        params = replace(params, skip_special_tokens=False)
    return params
