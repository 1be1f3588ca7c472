"""Numbers to bytes and back, in the two 8-bit floating-point types of the OCP standard.

    e4m3 (fn)  s eeee mmm   bias 7, largest 448, no infinity, NaN is 0x7f and 0xff
    e5m2       s eeeee mm   bias 15, largest 57344, infinity 0x7c, NaN above it

Encoding rounds to nearest, ties to even, and saturates: what is too large, infinity included,
becomes the largest finite number of its sign. NaN stays NaN. Decoding is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class Codec(ABC):
    """One 8-bit type.

    Attributes:
        largest: The largest finite value.
        dtype_name: torch's name for the type; used to round, never to store.
    """

    largest: ClassVar[float]
    dtype_name: ClassVar[str]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Bytes of ``x`` (any float dtype, any shape): uint8, same shape.

        torch's cast rounds right but does not saturate in every version and type, so values are
        clamped first; clamp lets NaN through.
        """
        import torch

        rounded = x.clamp(-self.largest, self.largest).to(getattr(torch, self.dtype_name))
        return rounded.view(torch.uint8)

    @abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Values of uint8 ``codes``: float16, which holds every value of both types exactly."""


class E4M3(Codec):
    """More precision, less range; what checkpoints with calibrated scales mean by fp8."""

    largest: ClassVar[float] = 448.0
    dtype_name: ClassVar[str] = "float8_e4m3fn"

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Seven bits to the left lie exponent and mantissa where float16 has them, subnormals
        too, but with a bias of 15 for one of 7: the value divided by 256. Several times as fast
        as torch's cast on a CPU.

        The shift copies the sign into bit 14, which is masked off. The NaN code would read as
        480, so it is looked for first; on a CPU the largest byte tells, at almost no cost.
        """
        import torch

        halves = codes.view(torch.int8).to(torch.int16)
        halves.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        values = halves.view(torch.float16).mul_(256.0)
        magnitudes = codes & 0x7F
        if not codes.is_cpu or (codes.numel() and magnitudes.amax().item() == 0x7F):
            values.masked_fill_(magnitudes == 0x7F, float("nan"))
        return values


class E5M2(Codec):
    """float16 with two bits of mantissa: more range, less precision."""

    largest: ClassVar[float] = 57344.0
    dtype_name: ClassVar[str] = "float8_e5m2"

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The byte is float16's high byte, infinity and NaN included."""
        import torch

        halves = codes.view(torch.int8).to(torch.int16)
        return halves.bitwise_left_shift_(8).view(torch.float16)
