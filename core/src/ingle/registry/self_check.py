"""Whether a kernel is right on this device, measured against plain PyTorch.

Shape letters: N output features, K input features, R rows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import ingle
from ingle.errors import PluginError
from ingle.plugin import DeviceInfo, KernelUse, LinearWeight, MatmulKernel
from ingle.registry.record import PluginRecord, describe

SEED = 20260101
MAX_ROWS_COMPARED = 4096
ROW_STRIDE = 31
"""Odd and below 32, so that every tile of 32 output features and every place in one is hit."""


def self_check_key(
    record: PluginRecord, kernel: MatmulKernel, weight: LinearWeight, use: KernelUse
) -> str:
    """What a measured error holds for: kernel, plugin, weight, device, dtype, rows, versions.

    The plugin's file time is in it too, so that an author who edits a kernel is not told what an
    earlier one did.
    """
    tensors = ",".join(f"{n}:{t.dtype}{list(t.shape)}" for n, t in weight.tensors().items())
    parts = (
        kernel.name,
        f"{record.distribution} {record.version} {_file_time(record, kernel)}",
        f"{type(weight).__name__}({tensors})",
        f"order={weight.input_order is not None} scale={weight.input_scale is not None}",
        _device_name(use.device),
        f"{use.dtype} rows {use.rows.start}-{use.rows.stop}",
        f"ingle {ingle.__version__} torch {torch.__version__}",
    )
    return " | ".join(parts)


def _device_name(device: DeviceInfo) -> str:
    return f"{device.type} {device.name} {device.capability}"


def _file_time(record: PluginRecord, kernel: MatmulKernel) -> int:
    module = sys.modules.get(type(kernel).__module__)
    path = getattr(module, "__file__", None) or record.source
    try:
        return Path(path).stat().st_mtime_ns if path else 0
    except OSError:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a weight's product must be, on a selection of its output features.

    Attributes:
        rows: int64 [N'] or None for all: the output features compared.
        matrix: [N', K] float32.
    """

    rows: torch.Tensor | None
    matrix: torch.Tensor
    num_rows: int

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """``x [R, K]`` times the selected rows: [R, N'] float32."""
        return x.float() @ self.matrix.t()

    def select(self, y: torch.Tensor) -> torch.Tensor:
        """The selected columns of a product [R, N]: [R, N']."""
        return y if self.rows is None else y.index_select(1, self.rows)


def make_reference(matrix_or_weight: torch.Tensor | LinearWeight) -> Reference:
    """The reference of a weight, copied out of it: [stored N, K] is compared whole up to
    ``MAX_ROWS_COMPARED`` output features, and every ``ROW_STRIDE``-th and the last beyond that,
    so that a start is not spent on the head of a large vocabulary."""
    if isinstance(matrix_or_weight, LinearWeight):
        matrix_or_weight = matrix_or_weight.dequantize()
    matrix, rows = matrix_or_weight, None
    num_rows = matrix.shape[0]
    if num_rows > MAX_ROWS_COMPARED:
        rows = torch.arange(0, num_rows, ROW_STRIDE, device=matrix.device)
        rows = torch.cat([rows, torch.tensor([num_rows - 1], device=matrix.device)])
        matrix = matrix.index_select(0, rows)
    return Reference(rows=rows, matrix=matrix.to(torch.float32, copy=True), num_rows=num_rows)


def check_kernel(
    kernel: MatmulKernel,
    weight: LinearWeight,
    reference: torch.Tensor,
    use: KernelUse,
    max_relative_error: float = 1e-2,
) -> str | None:
    """None when the kernel is right, or what is wrong with it in one line.

    Args:
        kernel: The kernel.
        weight: The weight as the kernel prepared it.
        reference: [stored N, K], ``dequantize()`` of the weight before it was prepared.
        use: Where and in what dtype; a few row counts out of ``use.rows`` are tried.
        max_relative_error: The format's bound for ``use.dtype``.
    """
    try:
        require_right(kernel, weight, make_reference(reference), use, max_relative_error)
    except Exception as error:
        return describe(error)
    return None


def require_right(
    kernel: MatmulKernel,
    weight: LinearWeight,
    reference: Reference,
    use: KernelUse,
    max_relative_error: float,
) -> float:
    """The kernel's worst relative Frobenius error; see ``check_kernel``.

    Raises:
        PluginError: When it is above the bound, or the result has another shape or dtype.
        Exception: Whatever the kernel raises.
    """
    worst = 0.0
    for rows in rows_to_check(use.rows):
        x = sample_rows(rows, weight.in_features, use)
        y = run_kernel(kernel, weight, x)
        if y.shape != (rows, reference.num_rows) or y.dtype != use.dtype:
            raise PluginError(
                f"it gave {y.dtype} {list(y.shape)} for {rows} rows, "
                f"not {use.dtype} {[rows, reference.num_rows]}"
            )
        found, wanted = reference.select(y), reference.product(x)
        worst = max(worst, relative_error(found, wanted, rows, max_relative_error))
    return worst


def relative_error(found: torch.Tensor, wanted: torch.Tensor, rows: int, bound: float) -> float:
    """||found - wanted|| / ||wanted||, at most ``bound``.

    Raises:
        PluginError: When it is more, or not a number.
    """
    size = torch.linalg.vector_norm(wanted.float())
    error = torch.linalg.vector_norm(found.float() - wanted.float()) / size.clamp_min(1e-30)
    if not error <= bound:
        raise PluginError(
            f"wrong by {error:.2g} (relative) for {rows} rows, allowed {bound:.2g}: set aside"
        )
    return float(error)


def rows_to_check(rows: range) -> list[int]:
    """The fewest rows of a use and 16 more: both sides of the border where tiles begin."""
    low = max(rows.start, 1)
    high = max(rows.stop - 1, low)
    return sorted({low, min(low + 16, high)})


def sample_rows(rows: int, in_features: int, use: KernelUse) -> torch.Tensor:
    """Standard normal activations, the same ones every time: [R, K] in ``use.dtype``."""
    generator = torch.Generator().manual_seed(SEED + rows)
    x = torch.randn(rows, in_features, generator=generator)
    return x.to(device=use.device.torch_device, dtype=use.dtype)


def run_kernel(kernel: MatmulKernel, weight: LinearWeight, x: torch.Tensor) -> torch.Tensor:
    """The kernel's product as core calls it: scale, order, workspace. [R, stored N]."""
    if weight.input_scale is not None:
        x = x * weight.input_scale.to(x.dtype)
    if weight.input_order is not None:
        x = x.index_select(1, weight.input_order)
    size = kernel.workspace_bytes(weight, x.shape[0])
    workspace = torch.zeros(size, dtype=torch.uint8, device=x.device) if size else None
    return kernel.matmul(x, weight, workspace=workspace)
