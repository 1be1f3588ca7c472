"""Picks the device and the activation dtype."""

from __future__ import annotations

import os

import torch

from ingle.errors import ConfigError
from ingle.plugin.device import DeviceInfo

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def choose_device(requested: str) -> DeviceInfo:
    """The device asked for; ``auto`` takes the first CUDA card, else the CPU.

    Raises:
        ConfigError: When CUDA was asked for and torch sees no card.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceInfo(type="cpu", total_memory=pages, name="CPU")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no CUDA card here. Use --device cpu, or install a CUDA "
            "build of torch and the card's driver."
        )
    properties = torch.cuda.get_device_properties(0)
    return DeviceInfo(
        type="cuda",
        capability=(properties.major, properties.minor),
        total_memory=properties.total_memory,
        name=properties.name,
    )


def choose_dtype(requested: str, stored: str, device: DeviceInfo) -> torch.dtype:
    """The activation dtype: what was asked for, else the checkpoint's.

    bfloat16 needs compute capability 8.0; an older card takes float16 when ``auto`` decides. On a
    CPU ``auto`` turns float16 into bfloat16: torch multiplies float16 there at an eighth of the
    speed (KERNELS.md section 7: 60 against 504 GFLOP/s).

    Raises:
        ConfigError: When bfloat16 was asked for on a card that has none.
    """
    if requested == "auto" and device.type == "cpu" and stored == "float16":
        return torch.bfloat16
    old_card = device.capability is not None and device.capability < (8, 0)
    dtype = _DTYPES[stored if requested == "auto" else requested]
    if dtype is torch.bfloat16 and old_card:
        if requested != "auto":
            raise ConfigError(
                f"--dtype bfloat16: {device.name} (compute capability "
                f"{device.capability}) has no bfloat16. Use --dtype float16."
            )
        return torch.float16
    return dtype
