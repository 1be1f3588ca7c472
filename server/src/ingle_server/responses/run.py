"""Computes one response: whole, as a stream of events, or in the background."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ingle.request import TokenLogprob
from ingle_server.chat_call import AnswerEnd, AnswerFollower, ChatCall
from ingle_server.errors import ApiError
from ingle_server.flight import Arrival
from ingle_server.logprobs import TokenNamer, chat_logprobs
from ingle_server.outputs import collect
from ingle_server.responses.conversation import new_id
from ingle_server.responses.output import Event, OutputBuilder
from ingle_server.responses.store import ResponseStore, StoredResponse
from ingle_server.responses.translate import wants_logprobs
from ingle_server.schemas.responses import (
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from ingle_server.streaming import Wire, named_frame
from ingle_server.tools.pieces import Piece, Reasoning


def new_response(body: ResponsesRequest, call: ChatCall) -> ResponseObject:
    """A response that has just begun."""
    params = call.flight.params
    return ResponseObject(
        id=new_id("resp"),
        created_at=float(int(time.time())),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=body.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
        store=body.store is not False,
        temperature=params.temperature,
        text={"format": {"type": "text"}, **(body.text or {})},
        tool_choice=body.tool_choice or "auto",
        tools=[{"strict": False, "parameters": None, **tool} for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


@dataclass(slots=True, kw_only=True)
class ResponseRun:
    """One response while it is computed.

    Attributes:
        body: What the client asked.
        call: Its generation.
        response: As it is now.
        items: The conversation that it answers.
        namer: Names tokens for logprobs.
        store: Where it is kept, unless the client does not want that.
    """

    body: ResponsesRequest
    call: ChatCall
    response: ResponseObject
    items: list[Item]
    namer: TokenNamer
    store: ResponseStore
    builder: OutputBuilder = field(default_factory=OutputBuilder)
    num_reasoning: int = 0

    async def whole(self) -> ResponseObject:
        """The finished response."""
        follower = AnswerFollower(self.call)
        (collected,) = await collect(self.call.flight, follower.usage)
        pieces, end = follower.whole(collected)
        self.push(pieces, collected.logprobs)
        self.count_thoughts(pieces, len(collected.token_ids))
        self.end(end, follower)
        return self.response

    def push(self, pieces: list[Piece], logprobs: list[TokenLogprob] | None) -> list[Event]:
        """Adds pieces to the output."""
        return self.builder.push(pieces, self._shown(logprobs))

    def end(self, end: AnswerEnd, follower: AnswerFollower) -> list[Event]:
        """Completes the response, and keeps it."""
        is_cut = end.reason == "length"
        events = self.builder.finish("incomplete" if is_cut else "completed")
        response = self.response
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = {"reason": "max_output_tokens"} if is_cut else None
        response.output = self.builder.output
        response.completed_at = None if is_cut else float(int(time.time()))
        response.usage = self._usage(follower)
        self.keep()
        return events

    def fail(self, error: ApiError) -> None:
        """Ends the response with ``error``, and keeps it."""
        self.response.status = "failed"
        self.response.output = self.builder.output
        self.response.error = {"code": error.code or "server_error", "message": str(error)}
        self.keep()

    def keep(self) -> None:
        """Puts it into the store; not again when it was begun in the background and is gone."""
        if self.body.store is False:
            return
        response, task = self.response, None
        if response.background and response.status != "in_progress":
            if not self.store.has(response.id):
                return
            task = self.store.get(response.id).task
        self.store.put(StoredResponse(response=response, items=self.items, task=task))

    def count_thoughts(self, pieces: list[Piece], num_tokens: int) -> None:
        """Shares an arrival's tokens out: to thoughts, when it holds nothing else."""
        thoughts = sum(len(piece.text) for piece in pieces if isinstance(piece, Reasoning))
        total = sum(len(getattr(piece, "text", "")) for piece in pieces)
        self.num_reasoning += round(num_tokens * thoughts / total) if total else 0

    def _shown(self, logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        if not logprobs or not wants_logprobs(self.body):
            return []
        entries = chat_logprobs(self.namer, logprobs, self.body.top_logprobs or 0).content
        return [msgspec.to_builtins(entry) for entry in entries]

    def _usage(self, follower: AnswerFollower) -> ResponseUsage:
        usage = follower.usage.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=min(self.num_reasoning, usage.completion_tokens)
            ),
            total_tokens=usage.total_tokens,
        )


class ResponseFrames:
    """Writes the events of a stream, numbered from 0."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run
        self._follower = AnswerFollower(run.call)
        self._number = 0

    @property
    def wire(self) -> Wire:
        """There is no ``[DONE]``; a failure is an event of its own."""
        return Wire(done=b"", failed=self._failed)

    def opening(self) -> bytes:
        """The response has begun."""
        kinds = ("response.created", "response.in_progress")
        return self._frames([self._response_event(kind) for kind in kinds])

    def write(self, arrival: Arrival) -> bytes:
        """What is new, and the end."""
        pieces, end = self._follower.follow(arrival)
        outputs = arrival.output.outputs
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        events = self._run.push(pieces, logprobs)
        self._run.count_thoughts(pieces, sum(len(output.token_ids) for output in outputs))
        if end is not None:
            events += self._run.end(end, self._follower)
            events.append(self._response_event(f"response.{self._run.response.status}"))
        return self._frames(events)

    def closing(self) -> bytes:
        """Nothing: the last event has been sent."""
        return b""

    def _failed(self, error: ApiError) -> bytes:
        if self._run.response.status == "cancelled":
            return b""
        self._run.fail(error)
        message = {"code": error.code or "server_error", "message": str(error)}
        return self._frames(
            [
                {"type": "error", **message, "param": error.param},
                self._response_event("response.failed"),
            ]
        )

    def _response_event(self, kind: str) -> Event:
        return {"type": kind, "response": msgspec.to_builtins(self._run.response)}

    def _frames(self, events: list[Event]) -> bytes:
        frames = b""
        for event in events:
            frames += named_frame({**event, "sequence_number": self._number})
            self._number += 1
        return frames
