"""What a user says about an EXL2 quant. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingle.plugin import ConfigError

HEAD_WIDTHS = (2, 3, 4, 5, 6, 8, 16)
LEAST_BITS = 2.0
MOST_BITS = 8.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl2Options:
    """How to make an EXL2 quant.

    Attributes:
        bpw: Bits per weight of the layers' linears on average, scales, orders and all included.
        head_bits: Bits of the output head: 2, 3, 4, 5, 6 or 8, of which a part gets more; 16 leaves
            it dense.
        measurement: A measurement to use again, `measurement.json` of an earlier output; when the
            file does not exist the model is measured and it is written.
        method: `gptq` spreads rounding errors by second-order information; `rtn` rounds every
            weight to the nearest code, without calibration: the baseline.
    """

    bpw: float = 4.0
    head_bits: int = 6
    measurement: str | None = None
    method: Literal["gptq", "rtn"] = "gptq"

    def __post_init__(self) -> None:
        if not LEAST_BITS < self.bpw <= MOST_BITS:
            raise ConfigError(
                f"--bpw must be above {LEAST_BITS:g} and at most {MOST_BITS:g}, got {self.bpw}."
            )
        if self.head_bits not in HEAD_WIDTHS:
            known = ", ".join(str(width) for width in HEAD_WIDTHS)
            raise ConfigError(f"--head-bits must be one of {known}, got {self.head_bits}.")
