"""Picks the activation dtype by name. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingle.errors import ConfigError
from ingle.plugin.device import DeviceInfo

NAMES: Final = {"float": "float32", "half": "float16"}
"""Other spellings."""
SIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one activation."""


@dataclass(frozen=True, slots=True)
class PlannedDType:
    """What a plan knows of an activation dtype where torch is not loaded.

    Attributes:
        name: torch's name for it.
        itemsize: Bytes of one value.
    """

    name: str
    itemsize: int


def choose_dtype_name(requested: str, stored: str, device: DeviceInfo) -> str:
    """The activation dtype, as torch names it: what was asked for, else the checkpoint's.

    bfloat16 needs compute capability 8.0; an older card takes float16 when ``auto`` decides. On a
    CPU ``auto`` turns float16 into bfloat16: torch multiplies float16 there at an eighth of the
    speed (KERNELS.md section 7: 60 against 504 GFLOP/s).

    Raises:
        ConfigError: When bfloat16 was asked for on a card that has none.
    """
    if requested == "auto" and device.type == "cpu" and stored == "float16":
        return "bfloat16"
    old_card = device.capability is not None and device.capability < (8, 0)
    wanted = stored if requested == "auto" else requested
    name = NAMES.get(wanted, wanted)
    if name == "bfloat16" and old_card:
        if requested != "auto":
            raise ConfigError(
                f"--dtype bfloat16: {device.name} (compute capability "
                f"{device.capability}) has no bfloat16. Use --dtype float16."
            )
        return "float16"
    return name
