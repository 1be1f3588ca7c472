"""Builds a response's output items from an answer's pieces, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ingle_server.responses.conversation import new_id
from ingle_server.schemas.responses import Item
from ingle_server.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]
_ADDED, _DONE = "response.output_item.added", "response.output_item.done"


class OutputBuilder:
    """One item is open at a time. Blank text is held back until it is clear that text follows.

    Events lack their ``sequence_number``. Whole answers are built by the same steps as streams, so
    that both have the same items.
    """

    def __init__(self) -> None:
        self.output: list[Item] = []
        self._open: Item | None = None
        self._blank = ""
        self._logprobs: list[dict[str, Any]] = []

    def push(self, pieces: Sequence[Piece], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Events of what is new; ``logprobs`` go with the text."""
        self._logprobs += logprobs
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._text(text)
                case Reasoning(text):
                    events += self._thought(text)
                case CallStart():
                    events += self._call(piece)
                case CallArguments(_, text):
                    events += self._arguments(text)
        return events

    def finish(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        """Events of the end: an answer that said nothing has one message without text."""
        events: list[Event] = []
        if not self.output or (self._open and self._open["type"] == "message"):
            text, self._blank = self._blank, ""
            events += self._say(text) if text or not self.output else []
        return events + self._close(status)

    def _text(self, text: str) -> list[Event]:
        text = self._blank + text
        self._blank = ""
        if not text.strip():
            self._blank = text
            return []
        return self._say(text)

    def _say(self, text: str) -> list[Event]:
        events = self._opened("message")
        item = self._opened_item()
        part = item["content"][0]
        part["text"] += text
        news, self._logprobs = self._logprobs, []
        part["logprobs"] += news
        if text:
            events.append(
                self._event("response.output_text.delta", content_index=0, delta=text)
                | {"logprobs": news}
            )
        return events

    def _thought(self, text: str) -> list[Event]:
        events = self._opened("reasoning")
        self._opened_item()["content"][0]["text"] += text
        delta = self._event("response.reasoning_text.delta", content_index=0, delta=text)
        return [*events, delta]

    def _call(self, start: CallStart) -> list[Event]:
        self._blank = ""
        events = self._close("completed")
        item = {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": start.id,
            "name": start.name,
            "arguments": "",
            "status": "in_progress",
        }
        return events + self._add(item)

    def _arguments(self, text: str) -> list[Event]:
        self._opened_item()["arguments"] += text
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def _opened(self, kind: Literal["message", "reasoning"]) -> list[Event]:
        """Opens an item of ``kind`` with its one part, unless it is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        if kind == "message":
            item: Item = {"type": kind, "id": new_id("msg"), "status": "in_progress"}
            item |= {"role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            part["logprobs"] = []
        else:
            item = {"type": kind, "id": new_id("rs"), "status": "in_progress"}
            item |= {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events += self._add(item)
        item["content"].append(part)
        added = self._event("response.content_part.added", content_index=0, part=_copy(part))
        return [*events, added]

    def _add(self, item: Item) -> list[Event]:
        self._open = item
        self.output.append(item)
        return [self._item_event(_ADDED, item)]

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events = self._part_done(item)
        events.append(self._item_event(_DONE, item))
        self._open = None
        return events

    def _part_done(self, item: Item) -> list[Event]:
        if item["type"] == "function_call":
            done = self._event("response.function_call_arguments.done")
            return [done | {"name": item["name"], "arguments": item["arguments"]}]
        part = item["content"][0]
        kind = f"response.{part['type']}.done"
        text = self._event(kind, content_index=0, text=part["text"])
        if part["type"] == "output_text":
            text["logprobs"] = list(part["logprobs"])
        done = self._event("response.content_part.done", content_index=0, part=_copy(part))
        return [text, done]

    def _opened_item(self) -> Item:
        if self._open is None:
            raise RuntimeError("no item is open")
        return self._open

    def _event(self, kind: str, **fields: Any) -> Event:
        item_id = self._opened_item()["id"]
        return {"type": kind, "item_id": item_id, "output_index": len(self.output) - 1, **fields}

    def _item_event(self, kind: str, item: Item) -> Event:
        return {"type": kind, "output_index": len(self.output) - 1, "item": _copy(item)}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """As it is now, for events that are encoded later."""
    copy = dict(value)
    if isinstance(copy.get("content"), list):
        copy["content"] = [dict(part) for part in copy["content"]]
    return copy
