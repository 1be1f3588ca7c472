"""How kernels are launched best on a card: measured once, kept on disk, read when a model loads.

A kernel's ``tune`` says which launches may be good and how long one takes; what was fastest lies in
a file per card. Nothing is measured while an engine starts or serves. On a card that is absent
every launch is compiled instead, so that tuning on the card finds its kernels in the compiler's
cache. Imports torch: for modules that have it already.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from ingle.plugin.cache_folder import default_cache_folder
from ingle.plugin.device import DeviceInfo

LAUNCHES = 20
"""Launches in a graph that is timed, at least."""
REPLAYS = 5
TOLERANCE = 0.01
"""Relative error of a launch against the default one, in 16 bit; they sum in other orders."""

Launch = TypeVar("Launch", bound=Hashable)
"""How a kernel may be launched: a frozen dataclass of numbers."""


class TunedLaunches:
    """Launches measured on one card, in one JSON file.

    A file that cannot be read counts as nothing measured, and so does a launch that is not among
    those that a kernel would choose from now.

    Args:
        device: The card; its name and Triton's version name the file.
        folder: Where such files lie.
    """

    def __init__(self, device: DeviceInfo, folder: Path | None = None) -> None:
        name = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-") or "card"
        file = f"{name}-triton-{_triton_version()}.json"
        self.device = device
        self.path = (folder or default_cache_folder()) / "launches" / file

    def get(self, key: str, choices: Sequence[Launch]) -> Launch | None:
        """The choice that was measured to be the fastest for ``key``; None when none was."""
        found = self._read().get(key)
        if not isinstance(found, dict):
            return None
        found = {name: value for name, value in found.items() if name != "us"}
        return next((choice for choice in choices if _numbers(choice) == found), None)

    def add(self, key: str, choice: Launch, seconds: float) -> None:
        """Keeps a measurement; other processes' are kept too, and the file is replaced at once.

        Raises:
            OSError: When it cannot be written.
        """
        entries = self._read() | {key: {**_numbers(choice), "us": seconds * 1e6}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entries, file, indent=0, sort_keys=True)
        Path(name).replace(self.path)

    def tune(self, key: str, choices: Sequence[Launch], seconds: Callable[[Launch], float]) -> str:
        """Measures every choice and keeps the fastest; on an absent card, where measuring one
        compiles it, nothing is kept.

        Args:
            key: What is measured: the kernel with its version, shapes and dtypes.
            choices: Launches that may be good, the default one first.
            seconds: Measures one, see ``launch_seconds``. One that raises is left out.

        Returns:
            What was found, in a line.

        Raises:
            RuntimeError: When none can be measured.
            OSError: When the file cannot be written.
        """
        found = measured(choices, seconds)
        if not found:
            raise RuntimeError(f"none of {len(choices)} launches ran: {key}")
        if self.device.is_absent:
            return f"{key}: {len(found)} launches compiled"
        best = min(found, key=lambda choice: found[choice])
        self.add(key, best, found[best])
        return f"{key}: {best}, {found[best] * 1e6:.1f} us"

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _numbers(launch: Hashable) -> dict[str, Any]:
    values: Any = launch
    return asdict(values)


def _triton_version() -> str:
    if find_spec("triton") is None:
        return "none"
    import triton

    return str(triton.__version__)


def measured(choices: Sequence[Launch], seconds: Callable[[Launch], float]) -> dict[Launch, float]:
    """What each choice takes, in their order; those that do not compile or run are left out."""
    found: dict[Launch, float] = {}
    for choice in dict.fromkeys(choices):
        try:
            found[choice] = seconds(choice)
        except _failures():
            continue
    return found


def _failures() -> tuple[type[Exception], ...]:
    if find_spec("triton") is None:
        return (RuntimeError, ValueError)
    from triton.errors import TritonError

    return (TritonError, RuntimeError, ValueError)


def num_copies(device: DeviceInfo, num_bytes: int) -> int:
    """Copies of ``num_bytes`` that are together larger than the card's L2 cache, so that launches
    on one after another read memory; one on a card that is absent."""
    if device.is_absent:
        return 1
    cache = torch.cuda.get_device_properties(device.torch_device).L2_cache_size
    return 2 + 2 * cache // num_bytes


def check_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises ValueError when a launch gave something else than the default one gave."""
    error = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30)
    if not float(error) <= TOLERANCE:
        raise ValueError(f"the launch is wrong by {float(error):.2g} (relative)")


def launch_seconds(device: DeviceInfo, calls: Sequence[Callable[[], object]]) -> float:
    """Seconds per launch on the card: the least of some replays of a CUDA graph in which the calls
    come one after another, 20 or more. On a card that is absent: 0, after one call.

    Args:
        device: The card.
        calls: The same launch on different bytes. Each must write to the same places every time.
    """
    calls[0]()
    if device.is_absent:
        return 0.0
    torch.cuda.synchronize(device.torch_device)
    graph = torch.cuda.CUDAGraph()
    count = max(LAUNCHES, len(calls))
    with torch.cuda.graph(graph):
        for number in range(count):
            calls[number % len(calls)]()
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
