"""Picks kernels for every linear as it is loaded, and counts what was picked."""

from __future__ import annotations

from collections import Counter

import torch

from ingle.model.huge_pages import HugePages
from ingle.model.linear import ROW_RANGES, PreparedWeight, Workspace
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.device import DeviceInfo
from ingle.plugin.linear import KernelUse, LinearWeight, MatmulKernel
from ingle.registry.kernels import KernelSelector


class KernelChooser:
    """Prepares a loaded weight for decoding and finds a kernel for every other row range.

    Decoding is bound by reading weights, so its kernel decides the layout; the others take the
    weight as that kernel left it.

    Attributes:
        counts: Linears served, by kernel name of the decode range.
        functions: What the kernels in use call and core may compile.
    """

    def __init__(
        self, selector: KernelSelector, device: DeviceInfo, dtype: torch.dtype, max_rows: int
    ) -> None:
        """
        Args:
            selector: Knows the kernels and which of them are right.
            device: Where the model runs.
            dtype: Activation dtype.
            max_rows: Rows of the largest step.
        """
        self._selector = selector
        self._device = device
        self._dtype = dtype
        self._max_rows = max_rows
        self._workspace = Workspace(torch.device(device.torch_device))
        self._pages = HugePages()
        self.counts: Counter[str] = Counter()
        self.functions: list[CompiledFunction] = []

    def __call__(self, weight: LinearWeight) -> PreparedWeight:
        """The weight in its decode kernel's layout, with a kernel per row range."""
        uses = [KernelUse(device=self._device, dtype=self._dtype, rows=rows) for rows in ROW_RANGES]
        first = self._selector.prepare(weight, uses[0])
        prepared = first.weight if first.weight is weight else self._settled(first.weight)
        rest = [self._selector.choose(prepared, use).kernel for use in uses[1:]]
        kernels = (first.kernel, *rest)
        self.counts[first.kernel.name] += 1
        for function in (one for kernel in kernels for one in kernel.functions(prepared)):
            if function not in self.functions:
                self.functions.append(function)
        return PreparedWeight(
            weight=prepared, kernels=kernels, workspace=self._reserve(prepared, kernels)
        )

    def _settled(self, weight: LinearWeight) -> LinearWeight:
        """A weight that was repacked just now, in huge pages when it lies in host memory."""
        return weight if self._device.type != "cpu" else self._pages.repacked(weight)

    def _reserve(self, weight: LinearWeight, kernels: tuple[MatmulKernel, ...]) -> Workspace | None:
        needs = [
            kernel.workspace_bytes(weight, min(rows.stop - 1, self._max_rows))
            for rows, kernel in zip(ROW_RANGES, kernels, strict=True)
        ]
        if not any(needs):
            return None
        self._workspace.reserve(max(needs))
        return self._workspace
