"""What a plugin is told about the device it will run on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device.

    Attributes:
        type: torch's device type: ``"cpu"`` or ``"cuda"``.
        index: Device ordinal; 0 on a CPU.
        capability: CUDA compute capability such as ``(8, 6)``; None on a CPU.
        total_memory: Bytes of memory the device has in all.
        name: The device's name as its driver gives it.
        multi_processors: A card's multiprocessors; None on a CPU, and where nobody asked.
        is_absent: Whether this card is not here: kernels are compiled for it and not run, tensors
            lie in host memory, and results mean nothing.
    """

    type: str
    index: int = 0
    capability: tuple[int, int] | None = None
    total_memory: int = 0
    name: str = ""
    multi_processors: int | None = None
    is_absent: bool = False

    @property
    def torch_device(self) -> str:
        """The device as torch spells it: ``cpu`` or ``cuda:0``; an absent card's is ``cpu``."""
        if self.type == "cpu" or self.is_absent:
            return "cpu"
        return f"{self.type}:{self.index}"
