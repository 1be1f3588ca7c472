"""The conformance tests of matmul kernels.

Shape letters: N output features as stored, K input features, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ingle.plugin import Epilogue, KernelUse, LinearWeight, MatmulKernel
from ingle.plugin.linear import COUNTER_BYTES
from ingle.testing.plugin_module import PluginConformance
from ingle.testing.tolerance import capped_bound, normal, relative_error

ROWS = (0, 1, 2, 7, 15, 16, 17, 64, 257)
"""None, one, and both sides of the borders where kernels change their tiles."""
FEW_ROWS = (1, 17)
MAX_ROWS = 512
MAX_ROW_ERROR = 1e-5
"""Compiled steps multiply and sum in float32."""
LEFTOVER = 0xFF
"""What an earlier kernel left in the workspace behind its counters: NaN in every float type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel with one weight it supports, prepared.

    Attributes:
        label: Kernel and weight, for test output.
        reference: [N, K] float32: ``dequantize()`` before preparing.
        bound: Relative Frobenius error allowed.
    """

    label: str
    kernel: MatmulKernel
    weight: LinearWeight
    reference: torch.Tensor
    dtype: torch.dtype
    bound: float

    def run(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """The product as core calls for it: ``x [R, K]`` scaled and ordered first."""
        if self.weight.input_scale is not None:
            x = x * self.weight.input_scale.to(x.dtype)
        if self.weight.input_order is not None:
            x = x[:, self.weight.input_order]
        size = self.kernel.workspace_bytes(self.weight, MAX_ROWS)
        workspace = torch.zeros(size, dtype=torch.uint8) if size else None
        if workspace is not None:
            workspace[COUNTER_BYTES:] = LEFTOVER
        y = self.kernel.matmul(x, self.weight, workspace=workspace, **options)
        dirty = workspace is not None and bool(workspace[:COUNTER_BYTES].any())
        assert not dirty, f"{self.label}: counters of the workspace left dirty"
        return y

    def sample(self, rows: int) -> torch.Tensor:
        """Activations [R, K]."""
        return normal(rows, self.reference.shape[1], dtype=self.dtype)

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        """The exact product in float64."""
        return x.double() @ self.reference.double().t()


class MatmulKernelConformance(PluginConformance):
    """Inherit, write ``weights``; every kernel the plugin gives is tested with every weight.

    Attributes:
        dtypes: Activation dtypes to try.
        kernel_names: Kernels that must support at least one weight, each in some dtype.
        max_relative_error: The format's declared bounds; capped at twice torch's own error.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    kernel_names: ClassVar[frozenset[str]]
    max_relative_error: ClassVar[Mapping[str, float]]

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        """Fresh weights, as loaded for activations in ``dtype``; kernels consume them."""
        raise AttributeError(f"{type(self).__name__} must define weights()")

    def kernels(self) -> list[MatmulKernel]:
        """The kernels under test: all that the plugin gives for ``device``."""
        return self.offered("ingle_matmul_kernels", MatmulKernel)

    def cases(self) -> Iterator[KernelCase]:
        """Every kernel with every weight and dtype it supports."""
        for kernel in self.kernels():
            for dtype in self.dtypes:
                use = KernelUse(device=self.device, dtype=dtype, rows=range(1, MAX_ROWS + 1))
                for index, weight in enumerate(self.weights(dtype)):
                    support = kernel.supports(weight, use)
                    assert support.ok or support.reason, f"{kernel.name} declines without reason"
                    if support.ok:
                        yield self._case(kernel, weight, dtype, index)

    def _case(
        self, kernel: MatmulKernel, weight: LinearWeight, dtype: torch.dtype, index: int
    ) -> KernelCase:
        reference = weight.dequantize().float().clone()
        return KernelCase(
            label=f"{kernel.name}, weight {index}, {dtype}",
            kernel=kernel,
            weight=kernel.prepare(weight),
            reference=reference,
            dtype=dtype,
            bound=capped_bound(self.max_relative_error, reference, dtype),
        )

    def test_every_named_kernel_supports_something(self) -> None:
        assert self.kernel_names <= {case.kernel.name for case in self.cases()}

    def test_a_compiled_steps_product_equals_dequantize_and_multiply(self) -> None:
        for case in self.cases():
            product = case.weight.row_product()
            if product is None:
                continue
            tensors = product.tensors()
            shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            assert shapes == product.shapes, f"{case.label}: not the shapes it announced"
            x = normal(1, case.reference.shape[1], dtype=torch.float32)
            row = x if case.weight.input_scale is None else x * case.weight.input_scale.float()
            order = case.weight.input_order
            row = row if order is None else row[:, order]
            found = product.function(tensors, row[0])
            error = relative_error(found, case.wanted(x)[0])
            assert error <= MAX_ROW_ERROR, f"{case.label}: {error:.1e} in a compiled step"

    def test_it_equals_dequantize_and_multiply_at_every_row_count(self) -> None:
        for case in self.cases():
            for rows in ROWS:
                x = case.sample(rows)
                y = case.run(x)
                assert y.shape == (rows, case.reference.shape[0]), case.label
                assert y.dtype is case.dtype, case.label
                error = relative_error(y, case.wanted(x))
                assert error <= case.bound, f"{case.label}: off by {error:.2g} at {rows} rows"

    def test_a_prepared_weight_still_dequantises(self) -> None:
        for case in self.cases():
            found = case.weight.dequantize()
            assert found.shape == case.reference.shape, case.label
            assert relative_error(found, case.reference) <= case.bound, case.label

    def test_a_strided_input_gives_the_same_and_is_left_alone(self) -> None:
        for case in self.cases():
            for rows in FEW_ROWS:
                x = case.sample(rows)
                wide = torch.zeros(rows, 2 * x.shape[1] + 8, dtype=case.dtype)
                strided = wide[:, 3 : 3 + x.shape[1]]
                strided.copy_(x)
                before = wide.clone()
                y = case.run(strided)
                assert torch.equal(wide, before), f"{case.label}: wrote to its input"
                assert relative_error(y, case.wanted(x)) <= case.bound, case.label

    def test_the_same_input_gives_the_same_bits(self) -> None:
        for case in self.cases():
            for rows in FEW_ROWS:
                x = case.sample(rows)
                assert torch.equal(case.run(x), case.run(x)), case.label

    def test_out_is_where_the_result_goes(self) -> None:
        for case in self.cases():
            for rows in FEW_ROWS:
                x = case.sample(rows)
                out = torch.full((rows, case.reference.shape[0]), 7.0, dtype=case.dtype)
                y = case.run(x, out=out)
                assert y.data_ptr() == out.data_ptr(), case.label
                assert relative_error(out, case.wanted(x)) <= case.bound, case.label

    def test_epilogues_it_lists_are_carried_out(self) -> None:
        for case in self.cases():
            assert case.kernel.epilogues <= {"add"}, case.label
            for rows in FEW_ROWS if "add" in case.kernel.epilogues else ():
                x = case.sample(rows)
                residual = normal(rows, case.reference.shape[0], dtype=case.dtype, seed=5)
                before = residual.clone()
                y = case.run(x, epilogue=Epilogue(kind="add", residual=residual))
                assert torch.equal(residual, before), f"{case.label}: wrote to the residual"
                error = relative_error(y, case.wanted(x) + residual.double())
                assert error <= 2 * case.bound, f"{case.label}: off by {error:.2g}"
