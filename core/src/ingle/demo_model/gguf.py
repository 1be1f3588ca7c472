"""A small GGUF reader: metadata, and the tensor types the demo model is stored in.

Layout (ggml's docs/gguf.md, versions 2 and 3): magic, version u32, tensor count u64, metadata
count u64, metadata key-value pairs, tensor infos, padding, tensor data. All little-endian.

Legend: N rows, K columns; GGUF states a matrix's shape as (K, N).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ingle.errors import CheckpointError

_MAGIC: Final = b"GGUF"
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_BLOCK: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """How ggml stores one type: ``block_bytes`` bytes hold ``block_size`` values."""

    name: str
    block_size: int
    block_bytes: int


_TYPES: Final = {
    0: TensorType(name="F32", block_size=1, block_bytes=4),
    1: TensorType(name="F16", block_size=1, block_bytes=2),
    3: TensorType(name="Q4_1", block_size=_BLOCK, block_bytes=20),
    8: TensorType(name="Q8_0", block_size=_BLOCK, block_bytes=34),
    30: TensorType(name="BF16", block_size=1, block_bytes=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        shape: In torch's order: (N, K) for a matrix.
        offset: First byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


class GGUFFile:
    """One GGUF file, memory-mapped.

    Attributes:
        metadata: Every key-value pair.
        tensors: Every tensor, by name, in file order.

    Raises:
        CheckpointError: When it is no GGUF file, is cut short, or uses another tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is no GGUF file: it is empty.")
        with path.open("rb") as file:
            # A private writable map: torch refuses to wrap read-only memory without a warning.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no complete GGUF file: {error}.") from error

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor as float32, dequantised, in torch's shape.

        Raises:
            CheckpointError: When the file has no such tensor or ends before it does.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name}.")
        if info.offset + info.nbytes > len(self._map):
            raise CheckpointError(f"{self.path} is cut short: tensor {name} goes on past its end.")
        if info.nbytes == 0 or math.prod(info.shape) % info.type.block_size:
            raise CheckpointError(
                f"{self.path}: tensor {name} of shape {info.shape} is no whole number of blocks of "
                f"{info.type.block_size} values."
            )
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return dequantize(raw, info.type).reshape(info.shape)

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file.")
        self._position = 4
        version, num_tensors, num_pairs = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; 2 and 3 are read.")
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {str(alignment)[:40]}.")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, kind, offset in infos:
            self.tensors[name] = TensorInfo(
                name=name, shape=shape, type=self._type(name, kind), offset=data_start + offset
            )

    def _type(self, name: str, kind: int) -> TensorType:
        if kind not in _TYPES:
            known = ", ".join(t.name for t in _TYPES.values())
            raise CheckpointError(
                f"{self.path}: tensor {name} has ggml type {kind}; {known} are read."
            )
        return _TYPES[kind]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._map, self._position)
        self._position += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        end = self._position + length
        if end > len(self._map):
            raise IndexError("a string goes on past the end of the file")
        text = self._map[self._position : end].decode("utf-8")
        self._position = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._scalar("<I"), self._scalar("<Q")
            return [self._value(item_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise IndexError(f"unknown metadata type {kind}")
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(dims)), self._scalar("<I"), self._scalar("<Q")


def dequantize(raw: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """The values stored in ``raw`` (uint8 [bytes]) as float32 [values].

    Block layouts are ggml's ``block_q4_1`` (scale f16, minimum f16, 16 bytes: the low halves are
    values 0-15, the high halves 16-31) and ``block_q8_0`` (scale f16, 32 int8).
    """
    if kind.name == "F32":
        return _as(raw, torch.float32)
    if kind.name in ("F16", "BF16"):
        return _as(raw, torch.float16 if kind.name == "F16" else torch.bfloat16).float()
    blocks = raw.view(-1, kind.block_bytes)
    scale = _as(blocks[:, 0:2], torch.float16).float()
    if kind.name == "Q8_0":
        return scale * blocks[:, 2:].view(torch.int8).float()
    minimum = _as(blocks[:, 2:4], torch.float16).float()
    packed = blocks[:, 4:]
    codes = torch.cat([packed & 0x0F, packed >> 4], dim=1)
    return scale * codes.float() + minimum


def _as(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``raw``'s bytes seen as ``dtype``; copied, since fields of a block are not aligned."""
    return raw.contiguous().clone().view(dtype)
