"""Kobold's streams."""

from __future__ import annotations

from ingle_server.error_shapes import kobold_error
from ingle_server.errors import ApiError
from ingle_server.flight import Arrival
from ingle_server.kobold.generations import Aborted, Generation
from ingle_server.outputs import finish_of
from ingle_server.streaming import Wire, frame, named_frame


class KoboldFrames:
    """Writes the events of a stream: one per piece of text, the reason with the last."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def wire(self) -> Wire:
        """There is no ``[DONE]``."""
        return Wire(done=b"", failed=self._failed)

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def write(self, arrival: Arrival) -> bytes:
        """What is new, of the first choice."""
        self._generation.add(arrival)
        frames = b""
        for piece in arrival.output.outputs:
            if piece.index == 0 and (piece.text or piece.finish_reason):
                frames += _frame(piece.text, finish_of(piece))
        return frames

    def closing(self) -> bytes:
        """Nothing: the last event has been sent."""
        return b""

    def _failed(self, error: ApiError) -> bytes:
        if isinstance(error, Aborted):
            return _frame("", "stop")
        return named_frame({"type": "error", **kobold_error(error)})


def _frame(text: str, reason: str | None) -> bytes:
    return b"event: message\n" + frame({"token": text, "finish_reason": reason})
