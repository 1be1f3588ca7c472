"""What lies between host memory and a device: where weights wait, and how they come over."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceBoundary(Protocol):
    """Copies from the host into buffers on a device, beside the computation.

    A slot is a buffer that one layer's weights lie in at a time. For every slot the calls are
    ``start``, ``wait``, ``done``, and again.
    """

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """uint8 ``data`` of the device as a copy in host memory that can be copied from quickly."""
        ...

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [``num_bytes``] on the device, for one slot."""
        ...

    def start(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begins to copy ``source`` (host) into ``target`` (the slot's buffer, from its start) as
        soon as computation is done with what lies there; returns at once."""
        ...

    def wait(self, slot: int) -> None:
        """What is computed from now on sees what was copied into the slot."""
        ...

    def done(self, slot: int) -> None:
        """What has been computed so far is the last that reads what lies in the slot."""
        ...


class CudaBoundary:
    """Pinned host memory, and a stream of its own for the copies; nothing here blocks the host.

    Args:
        device: The card.
        num_slots: Buffers in turn.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = _events(num_slots)
        self._free = _events(num_slots)

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """As ``DeviceBoundary.to_host``."""
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """As ``DeviceBoundary.buffer``."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def start(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """As ``DeviceBoundary.start``. An event that was never recorded holds nobody up."""
        self._copies.wait_event(self._free[slot])
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            self._ready[slot].record(self._copies)

    def wait(self, slot: int) -> None:
        """As ``DeviceBoundary.wait``."""
        torch.cuda.current_stream(self._device).wait_event(self._ready[slot])

    def done(self, slot: int) -> None:
        """As ``DeviceBoundary.done``."""
        self._free[slot].record(torch.cuda.current_stream(self._device))


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
