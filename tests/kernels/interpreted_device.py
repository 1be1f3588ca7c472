"""A CUDA card as plugins see it, whose tensors lie on the CPU for Triton's interpreter."""

from __future__ import annotations

from ingle.plugin import DeviceInfo


class InterpretedCard(DeviceInfo):
    """Says ``cuda`` where plugins ask what it is, and ``cpu`` where torch asks where it is."""

    @property
    def torch_device(self) -> str:
        return "cpu"


CARD = InterpretedCard(
    type="cuda", capability=(8, 9), total_memory=24 << 30, name="Triton's interpreter"
)
