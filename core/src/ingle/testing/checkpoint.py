"""A checkpoint that is nothing but tensors in memory: what a sample is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ingle.errors import CheckpointError
from ingle.plugin import CheckpointInfo

SAFETENSORS_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class MemoryReader:
    """A ``TensorReader`` over tensors in memory.

    Attributes:
        read: Names of the tensors that were read, in order.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self.read: list[str] = []

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Every name that starts with ``prefix``."""
        return tuple(name for name in self._tensors if name.startswith(prefix))

    def get(self, name: str) -> torch.Tensor:
        """The tensor itself, not a copy.

        Raises:
            CheckpointError: When there is none of that name.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{name}: no such tensor in this sample.")
        self.read.append(name)
        return self._tensors[name]

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """A view of elements ``start:stop`` along ``dim``."""
        return self.get(name).narrow(dim, start, stop - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheckpoint:
    """What a plugin is told about a checkpoint, and the tensors behind it."""

    info: CheckpointInfo
    reader: MemoryReader


def memory_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    *,
    hf_config: Mapping[str, Any] | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    config_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> MemoryCheckpoint:
    """A checkpoint of ``tensors``, described as the safetensors reader would describe it.

    ``quantization_config`` is put into ``hf_config`` too, where real files have it.
    """
    config = dict(hf_config or {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    info = CheckpointInfo(
        path=Path("/sample"),
        hf_config=config,
        quantization_config=quantization_config,
        config_files=config_files or {},
        tensor_shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        tensor_dtypes={name: SAFETENSORS_DTYPES[t.dtype] for name, t in tensors.items()},
    )
    return MemoryCheckpoint(info=info, reader=MemoryReader(tensors))


def stored_bytes(info: CheckpointInfo, tensor: str) -> int:
    """Bytes a tensor takes on disk, from its header."""
    sizes = {name: dtype.itemsize for dtype, name in SAFETENSORS_DTYPES.items()}
    count = 1
    for size in info.tensor_shapes[tensor]:
        count *= size
    return count * sizes[info.tensor_dtypes[tensor]]
