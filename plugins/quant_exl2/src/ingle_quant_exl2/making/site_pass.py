"""Quantises the linears of one site together: one order, one factor, one pass over the rows.

Letters: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from ingle.quantize.hessian import inverse_factor
from ingle.quantize.orders import by_activation
from ingle_quant_exl2.making.adaptive import Job, Quantised, quantise
from ingle_quant_exl2.making.options import BitPlan, padded

DAMPING: Final = 0.12
"""Of the mean of the Hessian's diagonal, as exllamav2 has it."""
PASS_VALUES: Final = 1 << 25
"""Weights in one pass: 128 MiB in float32, and as much again for what is decided."""


@dataclass(frozen=True, slots=True)
class SiteInput:
    """What the inputs of a site say about its linears.

    Attributes:
        order: int64 [K]: input feature of each row; the most important first.
        factor: float32 [K, K] in that order; None rounds to nearest.
    """

    order: torch.Tensor
    factor: torch.Tensor | None

    @classmethod
    def of(cls, hessian: torch.Tensor) -> SiteInput:
        """From the second moments of the inputs, float32 [K, K]. Inputs never seen (an expert no
        token visited) count alike."""
        if not bool(hessian.any()):
            hessian = torch.eye(len(hessian))
        order = by_activation(hessian.diagonal())
        return cls(order, inverse_factor(hessian[order][:, order], DAMPING))

    @classmethod
    def unknown(cls, in_features: int) -> SiteInput:
        """For rounding to nearest."""
        return cls(torch.arange(in_features), None)


def quantise_site(
    seen: SiteInput, wanted: Sequence[tuple[torch.Tensor, BitPlan]], search_stride: int = 1
) -> Iterator[Quantised]:
    """Each weight [N, K] with its plan, quantised; N is padded to a multiple of 32.

    Weights go through together as long as they fit ``PASS_VALUES``.
    """
    jobs: list[Job] = []
    held = 0
    for weight, plan in wanted:
        out_features, in_features = weight.shape
        if jobs and held + weight.numel() > PASS_VALUES:
            yield from quantise(jobs, seen.factor, search_stride)
            jobs, held = [], 0
        rows = F.pad(weight.cpu(), (0, 0, 0, padded(out_features) - out_features)).T[seen.order]
        jobs.append(Job(weight=rows.contiguous(), layout=plan.layout(in_features)))
        held += weight.numel()
    if jobs:
        yield from quantise(jobs, seen.factor, search_stride)


def in_place(quantised: Quantised, seen: SiteInput, out_features: int) -> torch.Tensor:
    """What it dequantises to, as a weight: float32 [N, K], inputs in their own order."""
    rows = quantised.dequantize()[torch.argsort(seen.order)]
    return rows.T[:out_features].contiguous()
