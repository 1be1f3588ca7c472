"""Expected decode speed by bandwidth arithmetic. No torch here.

One token of one sequence reads every weight and the sequence's cache once:
``t = bytes on the card / (0.85 x bandwidth) + bytes on the host / link + time between kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingle.engine.memory_plan import MemoryPlan

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
    host_bytes: int = 0,
) -> float | None:
    """Tokens a second of one sequence of ``context`` tokens.

    Args:
        plan: The plan.
        context: Tokens whose cache is read.
        num_layers: Layers.
        bandwidths: Of the device and its link.
        host_bytes: Of the weights, what is read over the link instead.
    """
    if bandwidths.memory is None or (host_bytes and bandwidths.link is None):
        return None
    read = plan.weights.without_embeddings - host_bytes + plan.bytes_per_token * context
    seconds = read / (EFFICIENCY * bandwidths.memory)
    if bandwidths.link is not None:
        seconds += host_bytes / bandwidths.link
    return 1 / (seconds + num_layers * SECONDS_PER_LAYER + SECONDS_PER_STEP)
