"""The header of one safetensors file, read and checked before a byte of data is mapped.

Layout (the safetensors format): header length u64 little-endian, that many bytes of JSON, then the
data. Offsets count from the start of the data, and tensors tile it without overlap or hole.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingle.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMENSIONS: Final = 16
_MAX_SIZE: Final = 2**63 - 1

DTYPE_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of every dtype that is read."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors dtype string.
        shape: Its dimensions.
        start: First byte, from the start of the file's data.
        stop: One past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """The checked header of one file.

    Attributes:
        path: The file.
        tensors: Every tensor, by name, in the order of its data.
        metadata: The ``__metadata__`` strings.
    """

    path: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(path: Path) -> ShardHeader:
    """Reads and checks the header of ``path``; reads none of its data.

    Raises:
        CheckpointError: Naming the file, and the tensor where there is one at fault.
    """
    content, data_bytes = _read_json(path)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ is a {_kind(metadata)}, not an object.")
    entries = {name: _entry(path, name, raw) for name, raw in content.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    _check_tiling(path, ordered, data_bytes)
    strings = {key: str(value) for key, value in metadata.items()}
    return ShardHeader(path=path, tensors=dict(ordered), metadata=strings)


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON object and how many bytes of data follow it."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            _check_length(path, len(prefix), length, file_bytes)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if len(text) != length:
        raise CheckpointError(f"{path} is truncated inside its header.")
    return _parse(path, text), file_bytes - 8 - length


def _check_length(path: Path, prefix_bytes: int, length: int, file_bytes: int) -> None:
    if prefix_bytes < 8:
        raise CheckpointError(
            f"{path} is truncated: {file_bytes} bytes cannot hold a safetensors header. "
            "Download it again."
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: its header claims {length} bytes, more than {MAX_HEADER_BYTES}. "
            "It is damaged or no safetensors file."
        )
    if length + 8 > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header claims {length} bytes, the file has {file_bytes}. "
            "Download it again."
        )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{path}: its header lists {key!r} twice.")
            found[key] = value
        return found

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its header is no JSON ({type(error).__name__}). "
            "It is damaged or no safetensors file."
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: its header is a {_kind(content)}, not a JSON object.")
    return content


def _entry(path: Path, name: str, raw: Any) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        raise CheckpointError(f"{where} lacks dtype, shape or data_offsets.")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{where} has dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPE_BYTES)}."
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{where} has shape {str(shape)[:80]}; a shape is a list of at most "
            f"{MAX_DIMENSIONS} integers of 0 or more."
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where} has data_offsets {str(offsets)[:80]}; they must be [start, end] with "
            "0 <= start <= end."
        )
    wanted = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != wanted:
        raise CheckpointError(
            f"{where} takes {offsets[1] - offsets[0]} bytes, but {dtype} of shape {shape} "
            f"takes {wanted}."
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _MAX_SIZE for v in value)


def _check_tiling(path: Path, ordered: list[tuple[str, TensorEntry]], data_bytes: int) -> None:
    """Tensors sorted by offset must follow each other exactly and end with the file."""
    end, before = 0, "the header"
    for name, entry in ordered:
        if entry.stop > data_bytes:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at data byte {entry.stop}, the file "
                f"has {data_bytes} data bytes. Download it again."
            )
        if entry.start < end:
            raise CheckpointError(f"{path}: tensors {before} and {name} overlap.")
        if entry.start > end:
            raise CheckpointError(
                f"{path}: {entry.start - end} unused bytes lie between {before} and tensor {name}."
            )
        end, before = entry.stop, name
    if end != data_bytes:
        raise CheckpointError(
            f"{path}: {data_bytes - end} bytes follow its last tensor ({before}). "
            "It is damaged; download it again."
        )


def _kind(value: Any) -> str:
    names = {dict: "JSON object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
