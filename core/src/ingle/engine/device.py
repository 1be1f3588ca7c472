"""Picks the device and the activation dtype."""

from __future__ import annotations

import os

import torch

from ingle.engine.dtype_choice import choose_dtype_name
from ingle.errors import ConfigError
from ingle.plugin.device import DeviceInfo


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
        multi_processors=properties.multi_processor_count,
    )


def choose_dtype(requested: str, stored: str, device: DeviceInfo) -> torch.dtype:
    """As ``choose_dtype_name``, as torch's own type.

    Raises:
        ConfigError: When bfloat16 was asked for on a card that has none.
    """
    dtype: torch.dtype = getattr(torch, choose_dtype_name(requested, stored, device))
    return dtype
