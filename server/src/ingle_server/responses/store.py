"""Responses kept for later turns: in memory, within bounds, the oldest forgotten first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from ingle_server.errors import ApiError
from ingle_server.schemas.responses import Item, ResponseObject

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response and the conversation that led to it.

    Attributes:
        response: As it is now.
        items: Everything the model was shown but instructions, oldest first.
        task: What computes it, while it does so in the background.
        num_bytes: Its size as JSON, about.
    """

    response: ResponseObject
    items: list[Item]
    task: asyncio.Task[None] | None = None
    num_bytes: int = field(default=0)

    @property
    def conversation(self) -> list[Item]:
        """The conversation with the response itself."""
        return [*self.items, *self.response.output]


class ResponseStore:
    """At most so many responses, at most so many bytes."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: dict[str, StoredResponse] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Keeps a response, or what has become of it."""
        known = self._stored.pop(stored.response.id, None)
        self._num_bytes -= known.num_bytes if known else 0
        stored.num_bytes = len(msgspec.json.encode((stored.response, stored.items)))
        self._stored[stored.response.id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self.pop(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse:
        """A response that is kept.

        Raises:
            ApiError: 404.
        """
        if response_id not in self._stored:
            raise ApiError(404, f"Response with id '{response_id[:80]}' not found.")
        return self._stored[response_id]

    def has(self, response_id: str) -> bool:
        """Whether it is kept."""
        return response_id in self._stored

    def pop(self, response_id: str) -> StoredResponse:
        """Forgets a response.

        Raises:
            ApiError: 404.
        """
        stored = self.get(response_id)
        del self._stored[response_id]
        self._num_bytes -= stored.num_bytes
        return stored
