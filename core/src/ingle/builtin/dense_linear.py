"""Dense weights in memory and the kernels that multiply with them.

Shape letters: N output features, K input features, R rows of activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch

from ingle.plugin import Epilogue, KernelUse, LinearWeight, MatmulKernel, RowProduct, Support
from ingle.plugin.row_counts import padded_rows, with_rows


class DenseWeight(LinearWeight):
    """A plain matrix, ``weight``: [N, K]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.stored_out_features = self.out_features

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values."""
        return self.weight.dtype

    def dequantize(self) -> torch.Tensor:
        """The matrix itself, not a copy: [N, K]."""
        return self.weight

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``weight``."""
        return {"weight": self.weight}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A weight of the same kind around other tensors."""
        return type(self)(tensors["weight"])

    def row_product(self) -> RowProduct | None:
        """A loop over the rows of the matrix, where it is in 16 bits."""
        if self.dtype is not torch.bfloat16:
            return None
        return RowProduct.over(dense_row, self.weight)


class PackedDenseWeight(DenseWeight):
    """``weight`` in oneDNN's blocked layout, an opaque mkldnn tensor of shape [N, K]."""

    def dequantize(self) -> torch.Tensor:
        """The matrix in the usual layout, a copy: [N, K]."""
        return self.weight.to_dense()

    def row_product(self) -> RowProduct | None:
        """A loop over a copy in the usual layout."""
        return RowProduct(
            function=dense_row,
            shapes=((tuple(self.weight.shape), self.dtype),),
            tensors=lambda: (self.dequantize().contiguous(),),
            copied_bytes=self.out_features * self.in_features * self.dtype.itemsize,
        )


STREAMS = 4
"""Places a product reads its weight from at once. One stream leaves a core waiting for memory at
every page border (docs/benchmarks.md)."""


def dense_row(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The ``RowProduct`` of a plain matrix [N, K]: products and sums in float32."""
    (weight,) = tensors
    if weight.shape[0] % STREAMS:
        return (weight.float() * x).sum(-1)
    parts = weight.view(STREAMS, -1, weight.shape[1])
    return torch.cat([(part.float() * x).sum(-1) for part in parts])


def concatenate(parts: Sequence[LinearWeight]) -> DenseWeight | None:
    """The parts stacked along N, or None when they cannot be."""
    dense = [part for part in parts if type(part) is DenseWeight]
    if not dense or len(dense) != len(parts):
        return None
    if len({(part.in_features, part.dtype) for part in dense}) != 1:
        return None
    return DenseWeight(torch.cat([part.weight for part in dense]))


LAYOUT_ROWS = 64
"""Rows that weights are laid out for. Beside the layout for one row, torch's own choice, up to 16
rows take as long, and prompts are a tenth to a fifth faster (docs/benchmarks.md)."""


class MkldnnKernel(MatmulKernel):
    """bf16 on a CPU, from a weight that oneDNN has laid out once: about twice as fast as
    ``F.linear`` on few rows (KERNELS.md section 7).

    The ops are private to torch, so every one is looked for before it is used.
    """

    name: ClassVar[str] = "dense_mkldnn"
    priority: ClassVar[int] = 10
    epilogues: ClassVar[frozenset[str]] = frozenset({"add"})

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """bf16 dense weights on a CPU whose oneDNN does bf16."""
        if not isinstance(weight, DenseWeight):
            return Support(ok=False, reason="not a dense weight")
        if use.device.type != "cpu" or weight.weight.device.type != "cpu":
            return Support(ok=False, reason="only on a CPU")
        if use.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
            return Support(ok=False, reason=f"only bfloat16, not {use.dtype}")
        return mkldnn_support()

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Repacks once. The layout serves every row count, see ``LAYOUT_ROWS``."""
        if isinstance(weight, PackedDenseWeight) or not isinstance(weight, DenseWeight):
            return weight
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return PackedDenseWeight(reorder(weight.weight.contiguous(), LAYOUT_ROWS))

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` times the packed weight, plus the residual in the same pass."""
        assert isinstance(weight, DenseWeight)
        linear = torch.ops.mkldnn._linear_pointwise
        rows = x.shape[0]
        x = with_rows(x, padded_rows(rows))
        if epilogue is None:
            y = linear.default(x, weight.weight, None, "none", [], "")
        else:
            residual = with_rows(epilogue.residual, x.shape[0])
            y = linear.binary(x, residual, weight.weight, None, "add")
        y = y[:rows]
        return y if out is None else out.copy_(y)


def mkldnn_support() -> Support:
    """Whether this torch on this processor has the ops and bf16 for ``MkldnnKernel``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return Support(ok=False, reason="this torch is built without oneDNN")
    ops = torch.ops.mkldnn
    for name in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"):
        if not hasattr(ops, name):
            return Support(ok=False, reason=f"this torch has no torch.ops.mkldnn.{name}")
    if not hasattr(ops._linear_pointwise, "binary"):
        return Support(ok=False, reason="torch.ops.mkldnn._linear_pointwise has no binary form")
    if not ops._is_mkldnn_bf16_supported():
        return Support(ok=False, reason="this processor has no bf16 for oneDNN (avx512 needed)")
    return Support(ok=True, reason="oneDNN with prepacked bf16 weights")


class DenseTorchKernel(MatmulKernel):
    """torch's own product, on every device and in every dtype. Safe in CUDA graphs."""

    name: ClassVar[str] = "dense_torch"

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """Dense weights in the usual layout and in the activation dtype."""
        if type(weight) is not DenseWeight:
            return Support(ok=False, reason="not a plain dense weight")
        if weight.dtype is not use.dtype:
            return Support(ok=False, reason=f"weight is {weight.dtype}, activations {use.dtype}")
        return Support(ok=True, reason="torch.nn.functional.linear")

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` times the weight."""
        assert isinstance(weight, DenseWeight)
        return multiply(x, weight.weight, out)


class DequantizeKernel(MatmulKernel):
    """Dequantise and multiply, every time: slow, always right, for every format and device."""

    name: ClassVar[str] = "dequantize"
    priority: ClassVar[int] = -1000

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """Everything: a weight that can do nothing else can dequantise."""
        return Support(ok=True, reason="dequantises the whole weight at every call")

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]``, scaled and ordered as the weight asks, times the weight."""
        return multiply(x, stored_order(weight).to(x.dtype), out)


def stored_order(weight: LinearWeight) -> torch.Tensor:
    """The weight as kernels see it: [stored N, K] without ``input_scale``, in ``input_order``.

    ``dequantize`` includes both, while core has already applied both to the input.
    """
    matrix = weight.dequantize()
    if weight.input_scale is not None:
        scale = weight.input_scale.to(matrix.dtype)
        matrix = torch.where(scale == 0, torch.zeros_like(matrix), matrix / scale)
    if weight.input_order is not None:
        matrix = matrix.index_select(1, weight.input_order)
    return matrix


def multiply(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``x [R, K]`` times ``matrix [N, K]`` transposed: [R, N], into ``out`` when there is one."""
    if out is None:
        return torch.nn.functional.linear(x, matrix)
    return torch.mm(x, matrix.t(), out=out)
