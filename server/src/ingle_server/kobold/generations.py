"""Kobold's generations under way: looked at and aborted by their key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ingle_server.errors import ApiError
from ingle_server.flight import Arrival, Flight
from ingle_server.outputs import UsageCounter, finish_of
from ingle_server.schemas.kobold import Body

MAX_KEPT = 64
"""Generations whose text can still be looked at after their end."""


class Aborted(ApiError):
    """Ends a generation early; it is no failure."""

    def __init__(self) -> None:
        super().__init__(499, "The generation was aborted.")


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request's generation.

    Attributes:
        flight: What computes it.
        texts: Of every choice, so far.
        reasons: Why each ended.
        is_over: Whether all have ended.
    """

    flight: Flight
    usage: UsageCounter
    texts: list[str]
    reasons: list[str | None] = field(default_factory=list)
    is_over: bool = False

    def add(self, arrival: Arrival) -> None:
        """Adds what is new."""
        self.usage.saw(arrival)
        for piece in arrival.output.outputs:
            self.texts[piece.index] += piece.text
            self.reasons[piece.index] = finish_of(piece) or self.reasons[piece.index]

    async def finish(self) -> Body:
        """The whole answer; what there is of it when it is aborted."""
        try:
            async for batch in self.flight.arrivals(ping_seconds=3600.0):
                for arrival in batch:
                    self.add(arrival)
        except Aborted:
            pass
        return self.results()

    def results(self) -> Body:
        """Every choice's text."""
        usage = self.usage.usage()
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        return {
            "results": [
                {"text": text, "finish_reason": reason or "stop", "logprobs": None, **counts}
                for text, reason in zip(self.texts, self.reasons, strict=True)
            ]
        }


class Generations:
    """Those under way and the latest ended ones, by key; the empty key is the latest of all."""

    def __init__(self) -> None:
        self._known: dict[str, Generation] = {}

    def begin(self, flight: Flight, genkey: str | None) -> Generation:
        """Notes a generation under its key."""
        n = flight.num_choices
        usage = UsageCounter(flight.num_prompt_tokens)
        generation = Generation(flight=flight, usage=usage, texts=[""] * n, reasons=[None] * n)
        for key in {genkey or "", ""}:
            self._known.pop(key, None)
            self._known[key] = generation
        while len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]
        return generation

    def texts(self, genkey: str | None) -> Sequence[str]:
        """The texts so far."""
        generation = self._known.get(genkey or "")
        return [""] if generation is None else generation.texts

    def abort(self, genkey: str | None) -> bool:
        """Ends a generation; False when there is none to end."""
        generation = self._known.get(genkey or "")
        if generation is None or generation.is_over:
            return False
        generation.flight.fail(Aborted())
        generation.is_over = True
        return True
