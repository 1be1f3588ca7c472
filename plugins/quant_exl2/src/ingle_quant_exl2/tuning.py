"""Which launches of an EXL2 product are measured on a card, and how; see ``plugin.launches``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ingle.plugin import DeviceInfo
from ingle.plugin.launches import check_same, launch_seconds, num_copies
from ingle_quant_exl2.kernel import (
    MAX_TILES,
    Exl2Config,
    default_splits,
    exl2_workspace_bytes,
    matmul_exl2,
)
from ingle_quant_exl2.planes import PackedExl2, plan_splits, split_shares

VERSION = 1
"""Of the kernel and the layout: what was measured for another does not count."""
BLOCKS = (16, 32)
"""Output features of a program. 64 of them spill on every architecture."""
SPLITS = (1, 2, 4, 8, 16, 24)
"""Programs along K that are asked for; a matrix has at least one for each of its sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl2Launch:
    """How a matrix is cut for a card.

    Attributes:
        block_n: Output features per program.
        splits: Programs along K that ``plan_splits`` is asked for.
    """

    block_n: int = 32
    splits: int = 1

    @property
    def config(self) -> Exl2Config:
        """What the kernel takes."""
        return Exl2Config(block_n=self.block_n)


def matrix_key(packed: PackedExl2) -> str:
    """What a measurement holds for: the kernel, the padded outputs, and each section's rows, bits
    and group size."""
    parts = [f"{s.stop - s.start}x{s.bits}g{s.group_size}" for s in packed.sections]
    return f"exl2 v{VERSION} {packed.words.shape[0] * 16} {'+'.join(parts)}"


def exl2_launches(packed: PackedExl2, num_sms: int) -> list[Exl2Launch]:
    """Launches that may be good for a matrix, the default one first; none that would spill.

    Args:
        packed: The matrix, its work dealt in any way.
        num_sms: The card's multiprocessors.
    """
    default = Exl2Launch(splits=default_splits(packed, num_sms))
    found: dict[tuple[int, int], Exl2Launch] = {}
    for launch in (default, *_others(packed)):
        # several numbers asked for may deal the work alike
        dealt = sum(split_shares(packed.sections, launch.splits))
        found.setdefault((launch.block_n, dealt), launch)
    return list(found.values())


def _others(packed: PackedExl2) -> Iterator[Exl2Launch]:
    for block_n in BLOCKS:
        if packed.words.shape[0] * 16 // block_n > MAX_TILES:
            continue
        for splits in SPLITS:
            yield Exl2Launch(block_n=block_n, splits=splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exl2Product:
    """One row times a matrix, to be measured.

    Attributes:
        packed: The matrix.
        device: The card.
        x: [1, K].
        wanted: [1, N], what the default launch gives.
    """

    packed: PackedExl2
    device: DeviceInfo
    x: torch.Tensor
    wanted: torch.Tensor

    def seconds(self, launch: Exl2Launch) -> float:
        """What it takes on the card, launched so; see ``launch_seconds``.

        Raises:
            ValueError: When the launch is wrong there.
        """
        planned = plan_splits(self.packed, launch.splits)
        words = planned.words
        number = num_copies(self.device, words.numel() * words.element_size())
        copies = [planned, *(replace(planned, words=words.clone()) for _ in range(number - 1))]
        out, space, config = torch.empty_like(self.wanted), _workspace(planned), launch.config
        calls = [
            partial(matmul_exl2, self.x, copy, config, out=out, workspace=space) for copy in copies
        ]
        seconds = launch_seconds(self.device, calls)
        if not self.device.is_absent:
            check_same(out, self.wanted)
        return seconds


def exl2_product(
    packed: PackedExl2, device: DeviceInfo, dtype: torch.dtype, default: Exl2Launch
) -> Exl2Product:
    """Random activations of ``dtype`` times the matrix."""
    x = torch.randn(1, packed.in_features, device=packed.words.device).to(dtype)
    wanted = x.new_empty(1, packed.out_features)
    planned = plan_splits(packed, default.splits)
    matmul_exl2(x, planned, default.config, out=wanted, workspace=_workspace(planned))
    return Exl2Product(packed=packed, device=device, x=x, wanted=wanted)


def _workspace(planned: PackedExl2) -> torch.Tensor:
    size = exl2_workspace_bytes(planned, 1)
    return torch.zeros(size, dtype=torch.uint8, device=planned.words.device)
