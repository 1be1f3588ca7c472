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
    """

    type: str
    index: int = 0
    capability: tuple[int, int] | None = None
    total_memory: int = 0
    name: str = ""

    @property
    def torch_device(self) -> str:
        """The device as torch spells it: ``cpu`` or ``cuda:0``."""
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"
