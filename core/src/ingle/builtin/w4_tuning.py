"""How 4-bit products are launched on a card: measured once per GPU, kept on disk, read at load.

Nothing is measured while an engine starts or serves: ``ingle compile`` on the card does it. Without
a measurement the launch is ``default_w4_config``'s, which fills the card by its multiprocessors.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

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
from ingle.plugin.cache_folder import default_cache_folder

VERSION = 1
"""Of the kernel and the layout: what was measured for another does not count."""
BLOCKS = (16, 32, 64)
SPLITS = (1, 2, 4, 8, 16)
LAUNCHES = 20
"""In a graph that is timed; each with weights of its own, together beyond the L2 cache."""
REPLAYS = 5
FEW_CHUNKS = 4
"""Chunks of 128 inputs that a program should have at least."""


class TunedLaunches:
    """Launches measured on one card, by weight, in one JSON file.

    A file that cannot be read, or says what cannot be, counts as nothing measured.

    Args:
        device: The card; its name and Triton's version name the file.
        folder: Where such files lie.
    """

    def __init__(self, device: DeviceInfo, folder: Path | None = None) -> None:
        name = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-") or "card"
        file = f"{name}-triton-{_triton_version()}.json"
        self.path = (folder or default_cache_folder()) / "launches" / file

    def get(self, packed: PackedW4) -> W4Config | None:
        """What was measured for such a weight, or None."""
        found = self._read().get(weight_key(packed))
        if not isinstance(found, dict):
            return None
        values: dict[str, Any] = {name: found.get(name) for name in asdict(W4Config())}
        return W4Config(**values) if _can_be(packed, values) else None

    def add(self, packed: PackedW4, config: W4Config, seconds: float) -> None:
        """Keeps a measurement; other processes' are kept too, and the file is replaced at once.

        Raises:
            OSError: When it cannot be written.
        """
        entries = self._read() | {weight_key(packed): {**asdict(config), "us": seconds * 1e6}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=0, sort_keys=True)
        Path(name).replace(self.path)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _triton_version() -> str:
    return str(triton.__version__)


def weight_key(packed: PackedW4) -> str:
    """What a measurement holds for: the kernel, the padded shape, groups, and what is read."""
    n, k = packed.padded
    zeros = "none" if packed.zeros is None else "fp16"
    return f"w4 v{VERSION} {n}x{k} g{packed.group_size} scales {packed.scales.dtype} zeros {zeros}"


def _can_be(packed: PackedW4, values: dict[str, Any]) -> bool:
    """Whether a launch read from a file is one."""
    block_n, splits = values["block_n"], values["splits"]
    n, k = packed.padded
    return (
        block_n in BLOCKS
        and n % block_n == 0
        and isinstance(splits, int)
        and 1 <= splits <= min(SPLITS[-1], k // CHUNK)
        and isinstance(values["prefetch"], bool)
        and values["num_stages"] in (1, 2, 3, 4)
    )


def launches(packed: PackedW4) -> Iterator[W4Config]:
    """Launches that may be good for a weight; none that the kernel would spill with."""
    n, k = packed.padded
    for block_n in BLOCKS:
        if n % block_n:
            continue
        for splits in SPLITS:
            is_thin = splits > 1 and k // CHUNK < FEW_CHUNKS * splits
            if is_thin or (splits > 1 and n // block_n > MAX_TILES):
                continue
            for prefetch in (True, False) if packed.group_size >= CHUNK else (False,):
                yield W4Config(block_n=block_n, splits=splits, prefetch=prefetch)


def tune(
    packed: PackedW4, num_sms: int, seconds: Callable[[W4Config], float]
) -> tuple[W4Config, float]:
    """The fastest launch for a weight, and what it takes; of equals the default one.

    Args:
        packed: The weight.
        num_sms: The card's multiprocessors.
        seconds: Measures a launch. One that raises is left out.

    Raises:
        RuntimeError: When none can be measured.
    """
    default = default_w4_config(packed, num_sms)
    choices = [default, *(config for config in launches(packed) if config != default)]
    found: dict[W4Config, float] = {}
    for config in choices:
        try:
            found[config] = seconds(config)
        except (TritonError, RuntimeError, ValueError):
            continue
    if not found:
        raise RuntimeError(f"none of {len(choices)} launches ran: {weight_key(packed)}")
    best = min(found, key=lambda config: found[config])
    return best, found[best]


def graph_seconds(packed: PackedW4, config: W4Config) -> float:
    """Seconds per launch with one row on the card: the least of some replays of a graph of many,
    over copies of the weight that are together larger than the L2 cache."""
    device = packed.words.device
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    size = packed.words.numel() * packed.words.element_size()
    copies = [replace(packed, words=packed.words.clone()) for _ in range(2 + 2 * cache // size)]
    x = torch.randn(1, packed.in_features, device=device).half()
    out = x.new_empty(1, packed.out_features)
    needed = w4_workspace_bytes(packed, 1, config)
    space = torch.zeros(needed, dtype=torch.uint8, device=device)

    def launch(number: int) -> None:
        matmul_w4(x, copies[number % len(copies)], config, out=out, workspace=space)

    launch(0)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    count = max(LAUNCHES, len(copies))
    with torch.cuda.graph(graph):
        for number in range(count):
            launch(number)
    graph.replay()
    return min(_replay_seconds(graph) for _ in range(REPLAYS)) / count


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
