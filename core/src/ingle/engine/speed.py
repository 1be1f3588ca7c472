"""Expected decode speed by bandwidth arithmetic. No torch here.

One token of one sequence reads every weight and the sequence's cache once:
``t = bytes on the card / (0.85 x bandwidth) + time between kernels``, and layers in host memory
come over meanwhile, at the speed of the link and two of them ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingle.engine.memory_plan import BUFFERS, MemoryPlan

EFFICIENCY: Final = 0.85
"""Of a card's data-sheet bandwidth, what well-made kernels reach on matrices of this size."""
SECONDS_PER_LAYER: Final = 15e-6
"""Ten kernels, 1.5 microseconds between two of them."""
SECONDS_PER_STEP: Final = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Bytes a second; None when not known.

    Attributes:
        memory: The device's own memory.
        link: Host memory to device.
    """

    memory: float | None = None
    link: float | None = None


def tokens_per_second(
    plan: MemoryPlan,
    context: int,
    num_layers: int,
    bandwidths: Bandwidths,
) -> float | None:
    """Tokens a second of one sequence of ``context`` tokens.

    Args:
        plan: The plan.
        context: Tokens whose cache is read.
        num_layers: Layers.
        bandwidths: Of the device and its link.
    """
    hosted = plan.offloaded_layers if plan.offloaded_layers > BUFFERS else 0
    if bandwidths.memory is None and not (hosted and bandwidths.link):
        return None
    # Without a figure for the device's memory the link alone bounds a model that streams.
    memory = EFFICIENCY * (bandwidths.memory or float("inf"))
    read = plan.weights.without_embeddings + plan.bytes_per_token * context
    seconds = read / memory + num_layers * SECONDS_PER_LAYER + SECONDS_PER_STEP
    if not hosted:
        return 1 / seconds
    if bandwidths.link is None:
        return None
    copy = plan.offloaded_bytes / hosted / bandwidths.link
    # Two layers come over while the device computes what it has, the others one by one as buffers
    # become free; all of them in every step.
    compute = plan.offloaded_bytes / hosted / memory + SECONDS_PER_LAYER
    resident = seconds - hosted * compute
    waiting = max(0, hosted - BUFFERS) * max(copy, compute)
    return 1 / max(hosted * copy, resident + BUFFERS * compute + waiting, seconds)
