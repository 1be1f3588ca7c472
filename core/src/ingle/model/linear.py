"""A linear layer: prepared weights, the kernels chosen for them, and the bias.

Shape letters: R rows, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ingle.model.pieces import pieces
from ingle.plugin.linear import Epilogue, LinearWeight, MatmulKernel

DECODE_ROWS = range(1, 17)
"""Row counts of decoding: weights are read once, the kernel is bound by memory."""
MIDDLE_ROWS = range(17, 65)
"""Several sequences, or the tail of a prompt."""
PREFILL_ROWS = range(65, 1 << 30)
"""Prompts: bound by arithmetic."""
ROW_RANGES = (DECODE_ROWS, MIDDLE_ROWS, PREFILL_ROWS)


class Workspace:
    """Scratch that every kernel of a model shares: they run one after another, and each leaves
    its counters at zero.

    Attributes:
        tensor: uint8, zeroed, large enough for the largest need, or None while nobody needs any.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor: torch.Tensor | None = None
        self._device = device

    def reserve(self, num_bytes: int) -> None:
        """Makes room for ``num_bytes``; called while weights load, never in a step."""
        if num_bytes > (0 if self.tensor is None else self.tensor.numel()):
            self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWeight:
    """A weight in its kernels' layout, and the kernel for each of ``ROW_RANGES``.

    ``workspace`` is None when no kernel of the weight needs any.
    """

    weight: LinearWeight
    kernels: tuple[MatmulKernel, ...]
    workspace: Workspace | None = None

    def matmul(self, x: torch.Tensor, epilogue: Epilogue | None = None) -> torch.Tensor:
        """``x`` [R, K], in the weight's input order, to [R, stored N]."""
        kernel = self.kernel_for(x.shape[0])
        scratch = None if self.workspace is None else self.workspace.tensor
        return kernel.matmul(x, self.weight, workspace=scratch, epilogue=epilogue)

    def kernel_for(self, num_rows: int) -> MatmulKernel:
        """The kernel that serves ``num_rows`` rows."""
        for rows, kernel in zip(ROW_RANGES, self.kernels, strict=True):
            if num_rows < rows.stop:
                return kernel
        return self.kernels[-1]


class Linear:
    """``x @ W.T + bias``, where W may be several weights side by side along N.

    Args:
        parts: The weights; their outputs are joined in this order.
        bias: [N] in the activation dtype, or None.
    """

    def __init__(self, parts: Sequence[PreparedWeight], bias: torch.Tensor | None = None) -> None:
        self.parts = tuple(parts)
        self.bias = bias
        self.out_features = sum(p.weight.out_features for p in self.parts)
        self._plain = len(self.parts) == 1 and _is_plain(self.parts[0].weight)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [R, K] to [R, N], plus ``residual`` [R, N] when it is given."""
        if self._plain:
            part = self.parts[0]
            epilogue = self._epilogue(part.kernel_for(x.shape[0]), residual)
            out = part.matmul(x, epilogue)
            if epilogue is not None:
                return out
        else:
            out = self._join(x)
        if self.bias is not None:
            out = out + self.bias
        return out if residual is None else out + residual

    def _epilogue(self, kernel: MatmulKernel, residual: torch.Tensor | None) -> Epilogue | None:
        """The residual as the kernel's own epilogue, where it has one and no bias comes first."""
        if residual is None or self.bias is not None or "add" not in kernel.epilogues:
            return None
        return Epilogue(kind="add", residual=residual)

    def _join(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the parts apart; inputs are gathered once per distinct order."""
        gathered: dict[int, torch.Tensor] = {}
        outputs = []
        for part in self.parts:
            weight = part.weight
            # Orders are compared by identity: the loader shares equal orders between parts.
            key = id(weight.input_order)
            if weight.input_scale is not None:
                rows = _ordered((x * weight.input_scale).to(x.dtype), weight)
            elif key in gathered:
                rows = gathered[key]
            else:
                rows = gathered[key] = _ordered(x, weight)
            out = part.matmul(rows)
            outputs.append(out[:, : weight.out_features])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _is_plain(weight: LinearWeight) -> bool:
    padded = weight.stored_out_features != weight.out_features
    return weight.input_order is None and weight.input_scale is None and not padded


def _ordered(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return x if weight.input_order is None else x[:, weight.input_order]


def find_linears(part: object) -> Iterator[Linear]:
    """Every linear in a model or a part of one."""
    return (one for one in pieces(part) if isinstance(one, Linear))
