"""The kernel for every weight that says how Triton decodes a tile of it.

Shape letters: R rows of activations, N output features as stored, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch

from ingle.builtin.tile_triton import (
    DTYPES,
    TILED_ROWS,
    decode_rows,
    multiply_tiles,
    tile_workspace_bytes,
)
from ingle.plugin import (
    Epilogue,
    KernelUse,
    LinearWeight,
    MatmulKernel,
    PluginError,
    Support,
    TritonDecode,
)

OLDEST = (8, 0)
"""Compute capability of the oldest card that kernels are compiled for in the tests."""
DECODE_ELEMENTS = 1 << 24
"""Weights decoded at a time for many rows."""


class TileWeight(LinearWeight):
    """A weight as its format keeps it, with its decoder made once."""

    def __init__(self, inner: LinearWeight, decode: TritonDecode) -> None:
        self.inner = inner
        self._decode = decode
        self.in_features = inner.in_features
        self.out_features = inner.out_features
        self.stored_out_features = inner.stored_out_features
        self.input_order = inner.input_order
        self.input_scale = inner.input_scale

    @property
    def triton(self) -> TritonDecode:
        """The inner weight's."""
        return self._decode

    def dequantize(self) -> torch.Tensor:
        """The inner weight's."""
        return self.inner.dequantize()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The inner weight's."""
        return self.inner.tensors()

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A copy around other tensors of the same names."""
        inner = self.inner.with_tensors(tensors)
        decode = inner.triton
        if decode is None:
            raise PluginError(f"{type(inner).__name__}.with_tensors loses its Triton decoder.")
        return type(self)(inner, decode)


class TileCudaKernel(MatmulKernel):
    """Any width and dtype, straight from the bytes of the checkpoint: a few rows share the inputs
    among programs, some more go tile by tile, and for many the weight is decoded, some outputs at a
    time, for torch's product. Kernels made for one layout are faster and come first."""

    name: ClassVar[str] = "tiles_triton"
    priority: ClassVar[int] = 5
    epilogues: ClassVar[frozenset[str]] = frozenset({"add"})

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """Weights with a decoder, on cards from compute capability 8.0 on."""
        if use.device.type != "cuda":
            return Support(ok=False, reason="only on CUDA")
        if use.device.capability is None or use.device.capability < OLDEST:
            return Support(ok=False, reason=f"compute capability {use.device.capability} < 8.0")
        if use.dtype not in DTYPES:
            return Support(ok=False, reason=f"activations are {use.dtype}")
        if weight.triton is None:
            return Support(ok=False, reason=f"{type(weight).__name__} has no Triton decoder")
        return Support(ok=True, reason=f"{len(weight.triton.sections)} sections decoded by tiles")

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Keeps the bytes as they are, and makes what the decoder reads beside them once."""
        if isinstance(weight, TileWeight) or weight.triton is None:
            return weight
        return TileWeight(weight, weight.triton)

    def workspace_bytes(self, weight: LinearWeight, max_rows: int) -> int:
        """Counters, partial sums of splits and sums of sections."""
        if not isinstance(weight, TileWeight) or weight.triton is None:
            return 0
        shape = (weight.stored_out_features, weight.in_features)
        return tile_workspace_bytes(weight.triton, shape, min(max_rows, TILED_ROWS))

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` times the weight, plus the residual: [R, N] in ``x``'s dtype."""
        decode = weight.triton
        if decode is None:
            raise PluginError(f"kernel {self.name} was given a {type(weight).__name__}.")
        rows = x.shape[0]
        y = out
        if y is None or not y.is_contiguous():
            y = x.new_empty(rows, weight.stored_out_features)
        residual = None if epilogue is None else epilogue.residual.contiguous()
        if rows > TILED_ROWS:
            _decoded_product(x, weight, decode, y)
            if residual is not None:
                y += residual
        elif rows:
            x = x if x.stride(1) == 1 else x.contiguous()
            multiply_tiles(x, decode, y, workspace, residual)
        return y if out is None or out is y else out.copy_(y)


def _decoded_product(
    x: torch.Tensor, weight: LinearWeight, decode: TritonDecode, out: torch.Tensor
) -> None:
    shape = (weight.stored_out_features, weight.in_features)
    step = max(1, DECODE_ELEMENTS // shape[1])
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        matrix = decode_rows(decode, shape, start, x.new_empty(stop - start, shape[1]))
        torch.mm(x, matrix.t(), out=out[:, start:stop])
