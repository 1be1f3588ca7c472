"""GPTQ for linears that read one input: order, groups, rounding with error feedback.

Shape letters: N output features, K input features, G groups.
Source: "GPTQ" (Frantar et al. 2022); group-aware reordering as GPTQModel does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingle.quantize.error_feedback import feed_errors_forward
from ingle.quantize.hessian import inverse_factor, silence_dead_inputs
from ingle.quantize.orders import by_activation, within_groups
from ingle_quant_gptq.making.grid import Grid, GridOptions, find_grid
from ingle_quant_gptq.making.options import GptqOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A quantised matrix, in the original input order.

    Attributes:
        codes: uint8 [N, K].
        scales: float32 [G, N], exact in float16.
        zeros: uint8 [G, N].
        group_ids: int32 [K]: the group of each input.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_ids: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        groups = self.group_ids.long()
        zeros = self.zeros.float().T[:, groups]
        return (self.codes.float() - zeros) * self.scales.T[:, groups]

    def rows(self, start: int, stop: int) -> Solved:
        """Output rows ``start:stop``."""
        return Solved(
            codes=self.codes[start:stop],
            scales=self.scales[:, start:stop],
            zeros=self.zeros[:, start:stop],
            group_ids=self.group_ids,
        )


def round_to_nearest(weight: torch.Tensor, options: GptqOptions) -> Solved:
    """Every weight to the nearest value of its group's grid: ``weight`` float32 [N, K]."""
    size = _group_size(weight, options)
    grids = _natural_grids(weight, options)
    codes = [
        (part / grid.scale[:, None]).round_().add_(grid.zero[:, None]).clamp_(0, grid.top)
        for part, grid in zip(torch.split(weight, size, 1), grids, strict=True)
    ]
    natural = torch.arange(weight.shape[1], device=weight.device) // size
    return _solved(torch.cat(codes, 1), grids, natural)


def solve(weight: torch.Tensor, hessian: torch.Tensor, options: GptqOptions) -> Solved:
    """GPTQ.

    Args:
        weight: float32 [N, K]; any number of linears of the same input, one under the other.
        hessian: float32 [K, K], undamped.
        options: Of all these linears.

    Raises:
        CheckpointError: When the Hessian cannot be factored at any damping.
    """
    weight, hessian = weight.clone(), hessian.clone()
    silence_dead_inputs(hessian, weight)
    size = _group_size(weight, options)
    order = _order(hessian.diagonal(), size, options)
    sorted_weight = weight[:, order]
    factor = inverse_factor(hessian[order][:, order], options.damp_percent)
    groups = _Groups(weight, sorted_weight, order, options)
    codes = torch.empty_like(weight)

    def round_column(k: int, column: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        grid = groups.at(k, current)
        codes[:, k] = found = grid.codes(column)
        return grid.values(found)

    feed_errors_forward(sorted_weight, factor, round_column)
    unsorted = torch.empty_like(codes)
    unsorted[:, order] = codes
    return _solved(unsorted, groups.grids(), groups.ids())


class _Groups:
    """Grids of groups in the order of quantising, found when a group's first column comes.

    A group is a run of sorted columns with dynamic groups, and where no column leaves its natural
    group; with static groups under act-order it is a natural one whose grid is known beforehand.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        sorted_weight: torch.Tensor,
        order: torch.Tensor,
        options: GptqOptions,
    ) -> None:
        num_inputs = weight.shape[1]
        self._size = _group_size(weight, options)
        self._options = options
        self._order = order
        natural = torch.arange(num_inputs, device=order.device) // self._size
        self._moves = options.desc_act and not options.static_groups
        # Under act-order without static groups, a group is what comes one after the other.
        self._of_column = natural if self._moves else natural[order]
        self._numbers: list[int] = self._of_column.tolist()
        self._grids: dict[int, Grid] = {}
        if options.static_groups:
            self._grids = dict(enumerate(_natural_grids(weight, options)))
        elif self._size >= num_inputs:
            self._grids = {0: find_grid(sorted_weight, _grid_options(options))}

    def at(self, k: int, current: torch.Tensor) -> Grid:
        """The grid of sorted column ``k``, from ``current`` [N, K] when its group begins."""
        number = self._numbers[k]
        if number not in self._grids:
            stop = k
            while stop < len(self._numbers) and self._numbers[stop] == number:
                stop += 1
            self._grids[number] = find_grid(current[:, k:stop], _grid_options(self._options))
        return self._grids[number]

    def grids(self) -> list[Grid]:
        """Every group's grid, by number."""
        return [self._grids[number] for number in sorted(self._grids)]

    def ids(self) -> torch.Tensor:
        """The group of each input in the original order: int64 [K]."""
        ids = torch.empty_like(self._of_column)
        ids[self._order] = self._of_column
        return ids


def _order(diagonal: torch.Tensor, size: int, options: GptqOptions) -> torch.Tensor:
    if options.desc_act:
        return by_activation(diagonal)
    if options.act_group_aware:
        return within_groups(diagonal, size)
    return torch.arange(len(diagonal), device=diagonal.device)


def _group_size(weight: torch.Tensor, options: GptqOptions) -> int:
    num_inputs = weight.shape[1]
    return num_inputs if options.group_size == -1 else min(options.group_size, num_inputs)


def _grid_options(options: GptqOptions) -> GridOptions:
    return GridOptions(options.bits, options.sym, options.mse)


def _natural_grids(weight: torch.Tensor, options: GptqOptions) -> list[Grid]:
    parts = torch.split(weight, _group_size(weight, options), 1)
    return [find_grid(part, _grid_options(options)) for part in parts]


def _solved(codes: torch.Tensor, grids: list[Grid], group_ids: torch.Tensor) -> Solved:
    return Solved(
        codes=codes.to(torch.uint8),
        scales=torch.stack([grid.scale for grid in grids]),
        zeros=torch.stack([grid.zero for grid in grids]).to(torch.uint8),
        group_ids=group_ids.to(torch.int32),
    )
