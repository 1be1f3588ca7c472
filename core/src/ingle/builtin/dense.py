"""Unquantised weights, as a plugin inside core: what a checkpoint holds when nobody packed it.

Shape letters: N output features, K input features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

from ingle.plugin import (
    CheckpointError,
    CheckpointInfo,
    Detection,
    DeviceInfo,
    LinearSpec,
    LinearWeight,
    MatmulKernel,
    Support,
    TensorReader,
    WeightFormat,
    WeightLoader,
    hookimpl,
)
from ingle.plugin.checkpoint import EMBEDDING_NAME

if TYPE_CHECKING:
    import torch

    from ingle.builtin.dense_linear import DenseWeight

INGLE_PLUGIN_API = (0, 1)

PRIORITY = -100
"""Below every claim that names a format: dense is what is left."""

FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""safetensors dtypes a dense weight may have, with their size. Float8 needs scales: not dense."""

STACKED_EXPERTS = re.compile(r"(^|\.)experts\.\w+$")
"""Names of tensors that hold one linear of every expert: [experts, N, K], with or without
``.weight`` behind them."""


class DenseFormat(WeightFormat):
    """Weights in bf16, fp16 or fp32, one tensor [N, K] named ``NAME.weight`` per linear."""

    name: ClassVar[str] = "dense"
    aliases: ClassVar[tuple[str, ...]] = ("none", "unquantized")

    def detect(self, info: CheckpointInfo) -> Detection | None:
        """A claim of the lowest priority on a checkpoint that shows no sign of quantisation."""
        if info.quantization_config or packed_tensor(info) is not None:
            return None
        if not dense_linears(info):
            return None
        return Detection(reason="no quantization_config and no packed tensors", priority=PRIORITY)

    def open(self, info: CheckpointInfo) -> DenseLoader:
        """A loader for every dense tensor, also those that a packed checkpoint leaves dense."""
        return DenseLoader(info)


class DenseLoader(WeightLoader):
    """Reads ``NAME.weight``."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._info = info
        self._linears = dense_linears(info)

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Every 2-D float ``NAME.weight`` that is not a lookup table: name -> (N, K).

        Also what every expert of a stacked tensor is; those are loaded with ``spec.expert``."""
        return self._linears

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """``NAME.weight``, or NAME itself for stacked experts."""
        return (stored_name(self._info, name),)

    def packed_bytes(self, name: str) -> int:
        """All values of the tensor in the stored dtype."""
        tensor = stored_name(self._info, name)
        if name not in self._linears:
            self._stored_shape(name)
        return (
            prod(self._info.tensor_shapes[tensor]) * FLOAT_BYTES[self._info.tensor_dtypes[tensor]]
        )

    def row_product_bytes(self, name: str) -> int:
        """The matrix, in bfloat16."""
        outputs, inputs = self._stored_shape(name)
        return outputs * inputs * 2

    def can_shard(self, spec: LinearSpec) -> Support:
        """A dense weight can be cut anywhere; one expert of a stack is loaded whole."""
        if spec.expert is not None:
            return Support(ok=spec.shard.axis is None, reason="experts are loaded whole")
        return Support(ok=True, reason="dense weights can be cut along both axes")

    def load_linear(self, spec: LinearSpec, reader: TensorReader) -> DenseWeight:
        """The weight in ``spec.dtype`` on ``spec.device``.

        Also reads a lookup table as a linear: that is what a tied lm_head is.

        Raises:
            CheckpointError: When the tensor is missing, not a float matrix, or of another shape.
        """
        from ingle.builtin.dense_linear import DenseWeight

        found = self._stored_shape(spec.name, spec.expert)
        wanted = (spec.out_features, spec.in_features)
        if found != wanted:
            raise CheckpointError(
                f"{spec.name}.weight: wanted shape {list(wanted)}, found {list(found)}. "
                "config.json does not belong to these weights."
            )
        if spec.expert is not None:
            weight = read_expert(stored_name(self._info, spec.name), spec.expert, reader)
        else:
            weight = read_shard(spec, reader)
        return DenseWeight(weight.to(device=spec.device.torch_device, dtype=spec.dtype))

    def fuse(self, parts: Sequence[LinearWeight]) -> LinearWeight | None:
        """The parts stacked along N; None when they differ in K or dtype."""
        from ingle.builtin.dense_linear import concatenate

        return concatenate(parts)

    def _stored_shape(self, name: str, expert: int | None = None) -> tuple[int, int]:
        """(N, K) of a matrix, or of one expert of a stack."""
        tensor = stored_name(self._info, name)
        shape = self._info.tensor_shapes.get(tensor)
        if shape is None:
            raise CheckpointError(f"{tensor}: no such tensor in {self._info.path}.")
        dtype = self._info.tensor_dtypes[tensor]
        wanted = "a matrix" if expert is None else f"a stack of more than {expert} matrices"
        fits = len(shape) == 2 if expert is None else len(shape) == 3 and expert < shape[0]
        if not fits or dtype not in FLOAT_BYTES:
            raise CheckpointError(
                f"{tensor}: wanted {wanted} of {', '.join(FLOAT_BYTES)}, "
                f"found {dtype} {list(shape)}."
            )
        return shape[-2], shape[-1]


def stored_name(info: CheckpointInfo, name: str) -> str:
    """The tensor of linear ``name``: stacked experts may lack the suffix."""
    weight = f"{name}.weight"
    bare = weight not in info.tensor_shapes and name in info.tensor_shapes
    return name if bare and STACKED_EXPERTS.search(name) else weight


def dense_linears(info: CheckpointInfo) -> dict[str, tuple[int, int]]:
    """Every dense linear of a checkpoint, from headers alone: name -> (N, K)."""
    found = {}
    for tensor, shape in info.tensor_shapes.items():
        if info.tensor_dtypes[tensor] not in FLOAT_BYTES:
            continue
        name = tensor.removesuffix(".weight")
        if len(shape) == 3 and STACKED_EXPERTS.search(name):
            found[name] = (shape[1], shape[2])
        elif len(shape) == 2 and name != tensor and not EMBEDDING_NAME.search(name):
            found[name] = (shape[0], shape[1])
    return found


def packed_tensor(info: CheckpointInfo) -> str | None:
    """The first tensor that holds packed weights whose module has no dense weight, or None.

    Packed means integers or float8 in two or more dimensions. ``position_ids``, an int64 buffer
    of old checkpoints, is the one matrix of integers that unquantised files have.
    """
    for tensor, shape in info.tensor_shapes.items():
        name, _, suffix = tensor.rpartition(".")
        if len(shape) < 2 or suffix == "position_ids":
            continue
        if info.tensor_dtypes[tensor] in FLOAT_BYTES or info.tensor_dtypes[tensor] == "BOOL":
            continue
        if info.tensor_dtypes.get(f"{name}.weight") not in FLOAT_BYTES:
            return tensor
    return None


def read_shard(spec: LinearSpec, reader: TensorReader) -> torch.Tensor:
    """The part of the weight this rank holds: [N', K'], as stored."""
    tensor = f"{spec.name}.weight"
    shard = spec.shard
    if shard.axis is None:
        return reader.get(tensor)
    return reader.get_slice(tensor, 0 if shard.axis == "out" else 1, shard.start, shard.stop)


def read_expert(tensor: str, expert: int, reader: TensorReader) -> torch.Tensor:
    """One expert's matrix [N, K] of a stack; only its bytes are read."""
    return reader.get_slice(tensor, 0, expert, expert + 1)[0]


@hookimpl
def ingle_weight_formats() -> list[WeightFormat]:
    """Dense weights."""
    return [DenseFormat()]


@hookimpl
def ingle_matmul_kernels(device: DeviceInfo) -> list[MatmulKernel]:
    """The prepacked kernel on a CPU, torch's own, and the fallback for every format."""
    from ingle.builtin.dense_linear import DenseTorchKernel, DequantizeKernel, MkldnnKernel

    kernels: list[MatmulKernel] = [DenseTorchKernel(), DequantizeKernel()]
    return [MkldnnKernel(), *kernels] if device.type == "cpu" else kernels
