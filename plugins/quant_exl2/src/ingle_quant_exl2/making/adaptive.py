"""Adaptive GPTQ: codes and scales of matrices that share one input, with errors fed forward.

Matrices are handled as [K, N], inputs down the rows, in descending order of importance. Columns
never influence each other, so any number of matrices and layouts over the same input go side by
side through one pass over the rows. Source: the algorithm of exllamav2 0.3.2's converter.

Letters: N output features, K input features, M columns of all matrices of a pass, G groups,
P trial factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ingle_quant_exl2.layout import ROW_UNIT, Layout
from ingle_quant_exl2.packing import (
    group_scales,
    pack_codes,
    pack_scale_codes,
    unpack_codes,
    unpack_scale_codes,
)

FACTORS: Final = 97
"""Trial factors on a group's scales, from 0.70 to 1.20."""
LEAST_FACTOR: Final = 0.70
MOST_FACTOR: Final = 1.20
LEAST_SCALE: Final = 2.0**-30
"""Stands for a scale that is zero when dividing; what it divides is zero then, or lost."""
TRIAL_VALUES: Final = 1 << 17
"""Weights tried at a time: 512 KiB, which stays in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A matrix to quantise with one layout.

    Attributes:
        weight: float32 [K, N], rows in quantised order.
        layout: Its groups.
    """

    weight: torch.Tensor
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A quantised matrix; rows in quantised order.

    Attributes:
        layout: Its groups.
        codes: uint8 [K, N].
        scale_codes: uint8 [G, N], 0 to 15.
        scale_max: float16 [G].
    """

    layout: Layout
    codes: torch.Tensor
    scale_codes: torch.Tensor
    scale_max: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """float32 [K, N], rounded as readers of the format round."""
        scales = group_scales(pack_scale_codes(self.scale_codes), self.scale_max).float()
        rows = torch.tensor([group.rows for group in self.layout.groups])
        zeros = torch.tensor([float(1 << (group.bits - 1)) for group in self.layout.groups])
        values = self.codes.float() - zeros.repeat_interleave(rows)[:, None]
        return (values * scales.repeat_interleave(rows, 0)).half().float()

    def tensors(self, order: torch.Tensor) -> dict[str, torch.Tensor]:
        """The five tensors of the file, by suffix; ``order`` int64 [K] is the input feature of each
        row."""
        words = [
            pack_codes(self.codes[section.start : section.stop], section.bits)
            for section in self.layout.sections
        ]
        pairs = [value for group in self.layout.groups for value in (group.bits, group.word)]
        return {
            "q_weight": torch.cat(words),
            "q_scale": pack_scale_codes(self.scale_codes),
            "q_scale_max": self.scale_max,
            "q_groups": torch.tensor(pairs, dtype=torch.int32).to(torch.int16),
            "q_invperm": torch.argsort(order).to(torch.int32),
        }


def from_tensors(layout: Layout, tensors: dict[str, torch.Tensor]) -> Quantised:
    """What ``Quantised.tensors`` wrote."""
    codes = [
        unpack_codes(tensors["q_weight"][s.word : s.word + s.num_words], s.bits)
        for s in layout.sections
    ]
    return Quantised(
        layout=layout,
        codes=torch.cat(codes),
        scale_codes=unpack_scale_codes(tensors["q_scale"]).to(torch.uint8),
        scale_max=tensors["q_scale_max"],
    )


class _Pass:
    """The state of one pass: all columns, what each's group says, and what has been decided."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.weight = torch.cat([job.weight for job in jobs], 1)
        widths = [job.weight.shape[1] for job in jobs]
        stops = torch.tensor(widths).cumsum(0).tolist()
        self.columns = [
            slice(stop - width, stop) for stop, width in zip(stops, widths, strict=True)
        ]
        columns = self.weight.shape[1]
        self.codes = torch.empty(self.weight.shape, dtype=torch.uint8)
        self.scale, self.zero, self.top = (torch.empty(columns) for _ in range(3))
        self.starts = [{g.start: g for g in job.layout.groups} for job in jobs]
        self.scale_codes: list[list[torch.Tensor]] = [[] for _ in jobs]
        self.scale_max: list[list[torch.Tensor]] = [[] for _ in jobs]

    def open_groups(self, row: int, stride: int) -> None:
        """Finds the scales of every group that begins at ``row``, from weights as they are now."""
        for index, starts in enumerate(self.starts):
            group = starts.get(row)
            if group is None:
                continue
            columns = self.columns[index]
            rows = self.weight[row : group.stop, columns]
            codes, largest = search_scales(rows, group.bits, stride)
            self.scale_codes[index].append(codes)
            self.scale_max[index].append(largest)
            chain = group_scales(pack_scale_codes(codes[None]), largest[None])[0].float()
            self.scale[columns] = chain
            self.zero[columns] = float(1 << (group.bits - 1))
            self.top[columns] = float((1 << group.bits) - 1)

    def round_row(self, row: int) -> torch.Tensor:
        """Decides a row's codes; returns what rounding took from its weights [M]."""
        weight = self.weight[row]
        codes = (weight / self.scale.clamp_min(LEAST_SCALE)).round_().add_(self.zero).clamp_(min=0)
        codes = torch.minimum(codes, self.top)
        self.codes[row] = codes.to(torch.uint8)
        return weight - (codes.sub_(self.zero).mul_(self.scale)).half().float()

    def results(self) -> list[Quantised]:
        """One per job."""
        return [
            Quantised(
                layout=job.layout,
                codes=self.codes[:, columns].contiguous(),
                scale_codes=torch.stack(codes),
                scale_max=torch.stack(largest),
            )
            for job, columns, codes, largest in zip(
                self.jobs, self.columns, self.scale_codes, self.scale_max, strict=True
            )
        ]


def quantise(
    jobs: Sequence[Job], factor: torch.Tensor | None, search_stride: int = 1
) -> list[Quantised]:
    """Codes and scales of every job.

    Args:
        jobs: Matrices over the same input, N a multiple of 8.
        factor: float32 [K, K], the upper Cholesky factor of the damped Hessian's inverse, in the
            same row order; None rounds to nearest.
        search_stride: Tries every so many of the scale factors and then the ones around the best:
            1 tries all.
    """
    state = _Pass(jobs)
    num_rows = state.weight.shape[0]
    for start in range(0, num_rows, ROW_UNIT):
        state.open_groups(start, search_stride)
        stop = start + ROW_UNIT
        errors = _round_unit(state, start, factor)
        if factor is not None and stop < num_rows:
            state.weight[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return state.results()


def _round_unit(state: _Pass, start: int, factor: torch.Tensor | None) -> torch.Tensor:
    """Rounds 32 rows, each after the errors of those before it; returns them scaled [32, M]."""
    stop = start + ROW_UNIT
    errors = torch.zeros(ROW_UNIT, state.weight.shape[1])
    for row in range(start, stop):
        error = state.round_row(row)
        if factor is None:
            continue
        error /= factor[row, row]
        errors[row - start] = error
        if row + 1 < stop:
            rest = state.weight[row + 1 : stop]
            rest.addr_(factor[row, row + 1 : stop], error, alpha=-1)
    return errors


def search_scales(
    rows: torch.Tensor, bits: int, stride: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale codes (uint8 [N], 0 to 15) and the largest scale (float16 scalar) of one group.

    Args:
        rows: float32 [rows, N].
        bits: Bits of a code.
        stride: As ``search_stride`` of ``quantise``.
    """
    base = (rows.abs().amax(0) + 1e-12) / ((2**bits - 1) / 2)
    largest = base.max()
    codes = (16 * (base / largest).sqrt()).round().clamp(1, 16)
    scales = (codes / 16).square() * largest
    factors = _factors()
    if stride > 1:
        coarse = torch.arange(0, FACTORS, stride)
        best = int(coarse[_errors(rows, scales, factors[coarse], bits).argmin()])
        near = torch.arange(max(0, best - stride + 1), min(FACTORS, best + stride))
        factor = factors[near[_errors(rows, scales, factors[near], bits).argmin()]]
    else:
        factor = factors[_errors(rows, scales, factors, bits).argmin()]
    return (codes - 1).to(torch.uint8), (factor * largest).half()


def _factors() -> torch.Tensor:
    steps = torch.arange(FACTORS, dtype=torch.float32) / (FACTORS - 1)
    return LEAST_FACTOR * (1 - steps) + MOST_FACTOR * steps


def _errors(
    rows: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, bits: int
) -> torch.Tensor:
    """Sum of |error| ** 3.5 over a group for each factor: [P]."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    at_once = max(1, TRIAL_VALUES // rows.numel())
    sums = []
    for some in torch.split(factors, at_once):
        trial = (some[:, None] * scales).unsqueeze(1)
        error = torch.div(rows, trial).round_().clamp_(low, high).mul_(trial).sub_(rows).abs_()
        cube = error.square().mul_(error)
        sums.append(cube.mul_(error.sqrt_()).sum((1, 2)))
    return torch.cat(sums)
