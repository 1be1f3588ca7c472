"""The small GGUF reader against the gguf package, and damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ingle import CheckpointError
from ingle.demo_model.gguf import GGUFFile
from ingle.demo_model.hf_folder import undo_rope_permutation, write_hf_folder

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_1"]


def write(path: Path, architecture: str = "llama", **tensors: tuple[np.ndarray, str]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.list", [1, 2, 3])
    writer.add_array("a.texts", ["x", "yz"])
    writer.add_float32("a.number", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_uint64("a.large", 2**40)
    for name, (values, kind) in tensors.items():
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_the_gguf_packages(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    path = write(tmp_path / "m.gguf", w=(values, kind))
    (stored,) = gguf.GGUFReader(path).tensors
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(5, 64)
    found = GGUFFile(path).read("w")
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.from_numpy(expected.copy()))


def test_metadata_is_read(tmp_path: Path) -> None:
    metadata = GGUFFile(write(tmp_path / "m.gguf")).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.text"] == "Grüße"
    assert metadata["a.list"] == [1, 2, 3]
    assert metadata["a.texts"] == ["x", "yz"]
    assert metadata["a.number"] == pytest.approx(0.1)
    assert metadata["a.flag"] is True
    assert metadata["a.large"] == 2**40


def test_the_rope_permutation_is_undone() -> None:
    weight = torch.arange(2 * 8 * 3).reshape(16, 3)
    # llama.cpp's converter: halves of a head become neighbours.
    permuted = weight.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert not torch.equal(permuted, weight)
    assert torch.equal(undo_rope_permutation(permuted, 2), weight)


def test_a_tensor_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    values = np.zeros((1, 256), np.float32)
    path = write(tmp_path / "m.gguf", w=(values, "Q5_0"))
    with pytest.raises(CheckpointError, match="tensor w has ggml type 6"):
        GGUFFile(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    values = np.zeros((4, 32), np.float32)
    content = write(tmp_path / "m.gguf", w=(values, "F32")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(1, len(content), 7):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            GGUFFile(cut).read("w")


def test_other_files_and_other_models_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"PK\3\4 not a model")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        GGUFFile(other)
    path = write(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba'"):
        write_hf_folder(path, tmp_path)


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tensor w"):
        GGUFFile(write(tmp_path / "m.gguf")).read("w")
