"""Damaged and hostile safetensors headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ingle import CheckpointError
from ingle.checkpoint.header import DTYPE_BYTES, read_header
from ingle.checkpoint.safetensors import open_checkpoint


def write(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def entry(dtype: str, shape: list[Any], start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("I8", [4], 16, 20)}

BAD_ENTRIES = {
    "negative dimension": (entry("F32", [-2, -2], 0, 16), "shape"),
    "huge dimension": (entry("F32", [2**64, 1], 0, 16), "shape"),
    "dimensions whose product wraps to the size": (entry("F32", [2**62, 4], 0, 16), "takes"),
    "too many dimensions": (entry("F32", [1] * 17 + [4], 0, 16), "shape"),
    "float dimension": (entry("F32", [2.0, 2], 0, 16), "shape"),
    "boolean dimension": (entry("F32", [True, 4], 0, 16), "shape"),
    "shape that is no list": (entry("F32", "2x2", 0, 16), "shape"),  # type: ignore[arg-type]
    "unknown dtype": (entry("F33", [2, 2], 0, 16), "F33"),
    "dtype that is no string": (entry(["F32"], [2, 2], 0, 16), "dtype"),  # type: ignore[arg-type]
    "size that is not dtype times shape": (entry("F16", [2, 2], 0, 16), "takes 16 bytes"),
    "reversed offsets": (entry("F32", [2, 2], 16, 0), "data_offsets"),
    "negative offset": (entry("F32", [2, 2], -16, 0), "data_offsets"),
    "offsets that are no pair": ({"dtype": "F32", "shape": [4], "data_offsets": [0]}, "offsets"),
    "missing offsets": ({"dtype": "F32", "shape": [4]}, "lacks"),
    "entry that is no object": ([1, 2], "lacks"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_bad_entry_is_refused_by_file_and_tensor(tmp_path: Path, case: str) -> None:
    bad, reason = BAD_ENTRIES[case]
    path = write(tmp_path / "model.safetensors", {"layer.weight": bad}, b"\0" * 16)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_header(path)
    assert "layer.weight" in str(caught.value)
    assert str(path) in str(caught.value)


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "header length beyond the file": (struct.pack("<Q", 10_000) + b"{}", "truncated"),
    "header length of 100 TB": (struct.pack("<Q", 10**14) + b"{}", "more than 100000000"),
    "negative header length": (struct.pack("<q", -1) + b"{}", "more than 100000000"),
    "header that is no JSON": (struct.pack("<Q", 4) + b"{{{{", "no JSON"),
    "header that is no UTF-8": (struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe", "no JSON"),
    "header that is a list": (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    "header nested 100 000 deep": (struct.pack("<Q", 10**5) + b"[" * 10**5, "no JSON"),
    "a pickle": (b"\x80\x04\x95" + b"x" * 64, "more than 100000000"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, reason = BAD_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_truncated_shard_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.zeros(8), "second": torch.zeros(8)}, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor second"):
        read_header(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD, b"\0" * 27)
    with pytest.raises(CheckpointError, match=r"7 bytes follow its last tensor \(b\)"):
        read_header(path)


def test_overlapping_tensors_are_refused_by_name(tmp_path: Path) -> None:
    header = {"a": entry("I8", [16], 0, 16), "b": entry("I8", [8], 12, 20)}
    path = write(tmp_path / "model.safetensors", header, b"\0" * 20)
    with pytest.raises(CheckpointError, match="tensors a and b overlap"):
        read_header(path)


def test_a_hole_between_tensors_is_refused_by_name(tmp_path: Path) -> None:
    header = {"a": entry("I8", [8], 0, 8), "b": entry("I8", [8], 12, 20)}
    path = write(tmp_path / "model.safetensors", header, b"\0" * 20)
    with pytest.raises(CheckpointError, match="4 unused bytes lie between a and tensor b"):
        read_header(path)


def test_a_name_listed_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("I8", [4], 0, 4))
    path = write(tmp_path / "m.safetensors", f'{{"a":{one},"a":{one}}}'.encode(), b"\0" * 4)
    with pytest.raises(CheckpointError, match="lists 'a' twice"):
        read_header(path)


def test_metadata_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {**GOOD, "__metadata__": [1]}, b"\0" * 20)
    with pytest.raises(CheckpointError, match="__metadata__ is a list"):
        read_header(path)


def test_tensors_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    header = {"z": entry("I8", [4], 4, 8), "a": entry("I8", [4], 0, 4)}
    path = write(tmp_path / "m.safetensors", header, b"\0" * 8)
    assert list(read_header(path).tensors) == ["a", "z"]


def test_empty_tensors_and_scalars_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"none": torch.zeros(0, 4), "one": torch.tensor(3.0), "x": torch.ones(2)}, path)
    found = read_header(path).tensors
    assert (found["none"].shape, found["one"].shape, found["x"].shape) == ((0, 4), (), (2,))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_known_dtype_is_read_as_torch_reads_it(tmp_path: Path, dtype: str) -> None:
    size = 3 * DTYPE_BYTES[dtype]
    data = bytes(range(1, size + 1)) if dtype != "BOOL" else b"\1\0\1"
    path = write(tmp_path / "m.safetensors", {"t": entry(dtype, [3], 0, size)}, data)
    tensor = open_checkpoint(path).get("t")
    assert tensor.shape == (3,)
    assert tensor.element_size() == DTYPE_BYTES[dtype]
    assert bytes(tensor.view(torch.uint8).tolist()) == data


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_whatever_is_accepted_the_library_accepts_too(
    tmp_path: Path, position: int, value: int, cut: int
) -> None:
    """One changed byte and a cut: either refused, or read by safetensors with the same shapes."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int16)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(bytes(content[: len(content) - cut] if cut else content))
    try:
        header = read_header(path)
    except CheckpointError:
        return
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(header.tensors)
        for name, found in header.tensors.items():
            assert tuple(file.get_tensor(name).shape) == found.shape
