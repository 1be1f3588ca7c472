"""Which launches of a 4-bit product are measured on a card, and how; see ``plugin.launches``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ingle.builtin.affine_triton import (
    CHUNK,
    PackedW4,
    W4Config,
    default_w4_config,
    matmul_w4,
    w4_workspace_bytes,
)
from ingle.builtin.split_k_triton import MAX_TILES
from ingle.plugin import DeviceInfo
from ingle.plugin.launches import check_same, launch_seconds, num_copies

VERSION = 1
"""Of the kernel and the layout: what was measured for another does not count."""
BLOCKS = (16, 32, 64)
SPLITS = (1, 2, 4, 8, 16)
FEW_CHUNKS = 4
"""Chunks of 128 inputs that a program should have at least."""


def weight_key(packed: PackedW4) -> str:
    """What a measurement holds for: the kernel, the padded shape, groups, and what is read."""
    n, k = packed.padded
    zeros = "none" if packed.zeros is None else "fp16"
    return f"w4 v{VERSION} {n}x{k} g{packed.group_size} scales {packed.scales.dtype} zeros {zeros}"


def w4_launches(packed: PackedW4, num_sms: int) -> list[W4Config]:
    """Launches that may be good for a weight, the default one first; none that would spill.

    Args:
        packed: The weight.
        num_sms: The card's multiprocessors.
    """
    default = default_w4_config(packed, num_sms)
    if packed.padded[0] // default.block_n > MAX_TILES:
        default = replace(default, splits=1)
    return list(dict.fromkeys([default, *_others(packed)]))


def _others(packed: PackedW4) -> Iterator[W4Config]:
    n, k = packed.padded
    for block_n in BLOCKS:
        if n % block_n:
            continue
        for splits in SPLITS:
            is_thin = splits > 1 and k // CHUNK < FEW_CHUNKS * splits
            if is_thin or (splits > 1 and n // min(block_n, 32) > MAX_TILES):
                continue
            for prefetch in (True, False) if packed.group_size >= CHUNK else (False,):
                yield W4Config(block_n=block_n, splits=splits, prefetch=prefetch)


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Product:
    """One row times a weight, to be measured.

    Attributes:
        packed: The weight.
        device: The card.
        x: [1, K].
        wanted: [1, N], what the default launch gives.
    """

    packed: PackedW4
    device: DeviceInfo
    x: torch.Tensor
    wanted: torch.Tensor

    def seconds(self, config: W4Config) -> float:
        """What it takes on the card, launched so; see ``launch_seconds``.

        Raises:
            ValueError: When the launch is wrong there.
        """
        words = self.packed.words
        number = num_copies(self.device, words.numel() * words.element_size())
        copies = [self.packed]
        copies += [replace(self.packed, words=words.clone()) for _ in range(number - 1)]
        out, space = torch.empty_like(self.wanted), _workspace(self.packed, config)
        calls = [
            partial(matmul_w4, self.x, copy, config, out=out, workspace=space) for copy in copies
        ]
        seconds = launch_seconds(self.device, calls)
        if not self.device.is_absent:
            check_same(out, self.wanted)
        return seconds


def w4_product(
    packed: PackedW4, device: DeviceInfo, dtype: torch.dtype, default: W4Config
) -> W4Product:
    """Random activations of ``dtype`` times the weight."""
    x = torch.randn(1, packed.in_features, device=packed.words.device).to(dtype)
    wanted = x.new_empty(1, packed.out_features)
    matmul_w4(x, packed, default, out=wanted, workspace=_workspace(packed, default))
    return W4Product(packed=packed, device=device, x=x, wanted=wanted)


def _workspace(packed: PackedW4, config: W4Config) -> torch.Tensor:
    size = w4_workspace_bytes(packed, 1, config)
    return torch.zeros(size, dtype=torch.uint8, device=packed.words.device)
