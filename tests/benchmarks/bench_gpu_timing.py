"""The card under ``bench_gpu.py``, and how launches on it are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ingle.builtin.affine_triton import W4Config

Row = dict[str, Any]
Launch = Callable[[], Any]


@dataclass(slots=True, kw_only=True)
class Bench:
    """The card, the sizes, and what earlier sections found.

    Attributes:
        copy_gbs: Measured copy bandwidth, GB/s, reads plus writes; 0 until measured.
        small: Interpreter: shapes shrink, nothing is a measurement.
        workspace: Zeroed; shared by all launches, which follow one another on one stream.
        best: Best configuration found for a 4-bit [N, K].
    """

    device: torch.device
    small: bool
    workspace: torch.Tensor
    copy_gbs: float = 0.0
    best: dict[tuple[int, int], W4Config] = field(default_factory=dict)

    @classmethod
    def create(cls, *, interpret: bool) -> Bench:
        device = torch.device("cpu" if interpret else "cuda")
        size = (1 << 24) if interpret else (1 << 27)
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls(device=device, small=interpret, workspace=workspace)

    @property
    def num_sms(self) -> int:
        return 2 if self.small else torch.cuda.get_device_properties(0).multi_processor_count

    def describe(self) -> Row:
        import triton

        row: Row = {"torch": torch.__version__, "triton": triton.__version__}
        if self.small:
            return row | {"device": "interpreter"}
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}{properties.minor}"
        return row | {"device": properties.name, "sm": capability, "sms": self.num_sms}

    def recover(self) -> None:
        """After a failed section: counters may be left over, memory may be held."""
        self.workspace.zero_()
        if not self.small:
            torch.cuda.empty_cache()

    def copies(self, nbytes: int) -> int:
        """Copies of something of ``nbytes`` that exceed the L2 cache threefold, 256 at most."""
        if self.small:
            return 2
        return max(2, min(256, -(-3 * torch.cuda.get_device_properties(0).L2_cache_size // nbytes)))

    def seconds(self, launches: Sequence[Launch]) -> float:
        """Mean seconds per launch over ``launches`` in one CUDA graph; median of 5 replays."""
        if self.small:
            started = time.perf_counter()
            for launch in launches:
                launch()
            return (time.perf_counter() - started) / len(launches)
        graph = capture(launches)
        graph.replay()
        times = [replay_seconds(graph) for _ in range(5)]
        return statistics.median(times) / len(launches)

    def rate(self, nbytes: int, seconds: float) -> Row:
        gbs = nbytes / seconds / 1e9
        share = gbs / self.copy_gbs if self.copy_gbs else 0.0
        return {"us": seconds * 1e6, "GB/s": gbs, "share": share}


def capture(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """All launches in one graph; the first run, which compiles, is outside."""
    for launch in launches[:8]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay, by CUDA events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error, in fp64."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
