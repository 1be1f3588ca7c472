"""The kernel for 4-bit affine weights on CUDA: Triton for a few rows, decode and multiply for more.

Shape letters: R rows of activations, N output features as stored, K input features.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ingle.builtin.affine_cuda_weight import TILE, W4CudaWeight, decode_tiles, pack_affine
from ingle.builtin.affine_triton import (
    MAX_ROWS,
    check_w4,
    matmul_w4,
    w4_workspace_bytes,
)
from ingle.builtin.w4_tuning import w4_launches, w4_product, weight_key
from ingle.plugin import (
    AffineWeight,
    DeviceInfo,
    Epilogue,
    KernelUse,
    LinearWeight,
    MatmulKernel,
    PluginError,
    Support,
)
from ingle.plugin.launches import TunedLaunches

DTYPES = (torch.float16, torch.bfloat16)
OLDEST = (8, 0)
"""Compute capability from which tensor cores take 16 x 8 x 16 tiles and bfloat16."""
LARGEST_ZERO = 16
DECODE_ELEMENTS = 1 << 24
"""Weights decoded at a time for many rows: 32 MiB of matrix, about 150 MiB on the way to it."""


class W4CudaKernel(MatmulKernel):
    """4-bit codes with integer zeros in regular groups, in float16 and bfloat16.

    Up to 32 rows go through the Triton kernel, which reads every code once. More are bound by
    arithmetic: the same bytes are decoded, some output features at a time, for torch's product.
    """

    name: ClassVar[str] = "w4_triton"
    priority: ClassVar[int] = 20
    epilogues: ClassVar[frozenset[str]] = frozenset({"add"})

    def __init__(self, device: DeviceInfo) -> None:
        self._num_sms = multi_processors(device)
        self._tuned = TunedLaunches(device)

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """What fits the packed layout, on cards from compute capability 8.0 on."""
        if use.device.type != "cuda":
            return Support(ok=False, reason="only on CUDA")
        if use.device.capability is None or use.device.capability < OLDEST:
            return Support(ok=False, reason=f"compute capability {use.device.capability} < 8.0")
        if use.dtype not in DTYPES:
            return Support(ok=False, reason=f"only float16 and bfloat16, not {use.dtype}")
        if isinstance(weight, W4CudaWeight):
            return Support(ok=True, reason="packed for Triton; decoded for more than 32 rows")
        if not isinstance(weight, AffineWeight):
            return Support(ok=False, reason=f"not an affine weight: {type(weight).__name__}")
        reason = misfit(weight)
        return Support(ok=not reason, reason=reason or "4 bits, integer zeros, regular groups")

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Packs codes in fragment order, once."""
        if not isinstance(weight, AffineWeight):
            return weight
        packed = pack_affine(weight)
        choices = w4_launches(packed, self._num_sms)
        config = self._tuned.get(weight_key(packed), choices) or choices[0]
        return W4CudaWeight(
            packed=packed,
            config=config,
            in_features=weight.in_features,
            out_features=weight.out_features,
            stored_out_features=weight.stored_out_features,
            input_order=weight.input_order,
            input_scale=weight.input_scale,
        )

    def tune(self, weight: LinearWeight, dtype: torch.dtype) -> str:
        """Measures launches with one row, and keeps the fastest for later starts."""
        if not isinstance(weight, W4CudaWeight):
            return ""
        packed, choices = weight.packed, w4_launches(weight.packed, self._num_sms)
        product = w4_product(packed, self._tuned.device, dtype, choices[0])
        return self._tuned.tune(weight_key(packed), choices, product.seconds)

    def workspace_bytes(self, weight: LinearWeight, max_rows: int) -> int:
        """Counters and partial sums of the split along K."""
        if not isinstance(weight, W4CudaWeight):
            return 0
        return w4_workspace_bytes(weight.packed, min(max_rows, MAX_ROWS), weight.config)

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
        if not isinstance(weight, W4CudaWeight):
            raise PluginError(f"kernel {self.name} was given a {type(weight).__name__}.")
        rows = x.shape[0]
        y = out
        if y is None or not y.is_contiguous():
            y = x.new_empty(rows, weight.stored_out_features)
        residual = None if epilogue is None else epilogue.residual
        if rows > MAX_ROWS:
            _decoded_product(x, weight, y)
            if residual is not None:
                y += residual
        elif rows:
            residual = None if residual is None else residual.contiguous()
            matmul_w4(
                x, weight.packed, weight.config, out=y, workspace=workspace, residual=residual
            )
        return y if out is None or out is y else out.copy_(y)


def misfit(weight: AffineWeight) -> str:
    """Why the packed layout cannot hold ``weight``, or an empty string."""
    if weight.bits != 4:
        return f"{weight.bits} bits, not 4"
    if weight.offsets is not None:
        return "float offsets instead of integer zeros"
    if weight.group_offsets is not None:
        return "groups of unequal length"
    if weight.zeros is not None and int(weight.zeros.max()) > LARGEST_ZERO:
        return f"a zero of {int(weight.zeros.max())}, above {LARGEST_ZERO}"
    try:
        check_w4((weight.stored_out_features, weight.in_features), weight.group_size)
    except ValueError as error:
        return str(error)
    return ""


def multi_processors(device: DeviceInfo) -> int:
    """The card's multiprocessors; a common number where nobody knows them."""
    return device.multi_processors or 128


def _decoded_product(x: torch.Tensor, weight: W4CudaWeight, out: torch.Tensor) -> None:
    num_tiles = -(-weight.stored_out_features // TILE)
    step = max(1, DECODE_ELEMENTS // (TILE * weight.in_features))
    for start in range(0, num_tiles, step):
        stop = min(start + step, num_tiles)
        last = min(stop * TILE, weight.stored_out_features)
        matrix = decode_tiles(weight.packed, start, stop, x.dtype)[: last - start * TILE]
        torch.mm(x, matrix.t(), out=out[:, start * TILE : last])
