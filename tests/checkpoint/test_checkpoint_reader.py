"""Reading tensors, and what a checkpoint says about itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingle import CheckpointError
from ingle.checkpoint.load_report import LoadProgress, LoadReport, shorten_names
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.plugin import TensorReader

Writer = Callable[..., Path]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(6, 4, generator=generator).to(torch.bfloat16),
        "layers.0.bias": torch.randn(6, generator=generator),
        "layers.1.codes": torch.randint(-128, 128, (3, 2, 5), generator=generator).to(torch.int8),
        "scalar": torch.tensor(2.5),
    }


@pytest.fixture
def folder(write_model: Writer, tensors: dict[str, torch.Tensor]) -> Path:
    first = {k: v for k, v in tensors.items() if "layers.0" in k}
    second = {k: v for k, v in tensors.items() if "layers.0" not in k}
    return write_model(
        {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    )


def test_a_checkpoint_is_a_tensor_reader(folder: Path) -> None:
    assert isinstance(open_checkpoint(folder), TensorReader)


def test_every_tensor_comes_back_bit_for_bit(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in tensors.items():
        found = checkpoint.get(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_names_are_chosen_by_prefix(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names("layers.0.")) == {"layers.0.weight", "layers.0.bias"}
    assert checkpoint.names("nothing") == ()


@pytest.mark.parametrize(
    ("name", "dim", "start", "stop"),
    [
        ("layers.0.weight", 0, 2, 5),
        ("layers.0.weight", 1, 1, 3),
        ("layers.0.bias", 0, 0, 6),
        ("layers.0.bias", 0, 3, 3),
        ("layers.1.codes", 1, 1, 2),
        ("layers.1.codes", 2, 2, 5),
    ],
)
def test_a_slice_is_that_part_of_the_tensor(
    folder: Path, tensors: dict[str, torch.Tensor], name: str, dim: int, start: int, stop: int
) -> None:
    expected = tensors[name].narrow(dim, start, stop - start)
    assert torch.equal(open_checkpoint(folder).get_slice(name, dim, start, stop), expected)


@pytest.mark.parametrize(
    ("name", "dim", "start", "stop"),
    [
        ("layers.0.weight", 0, 2, 7),
        ("layers.0.weight", 2, 0, 1),
        ("layers.0.weight", -1, 0, 1),
        ("layers.0.weight", 0, -1, 2),
        ("layers.0.weight", 0, 3, 2),
        ("scalar", 0, 0, 1),
    ],
)
def test_a_slice_outside_the_tensor_is_refused_by_name(
    folder: Path, name: str, dim: int, start: int, stop: int
) -> None:
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
        open_checkpoint(folder).get_slice(name, dim, start, stop)


def test_an_absent_tensor_is_refused_by_name(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for read in (checkpoint.get, lambda name: checkpoint.get_slice(name, 0, 0, 1)):
        with pytest.raises(CheckpointError, match="has no tensor no such thing"):
            read("no such thing")


def test_unread_tensors_are_known(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.unread()) == 4
    checkpoint.get("scalar")
    checkpoint.get_slice("layers.0.bias", 0, 0, 2)
    assert set(checkpoint.unread()) == {"layers.0.weight", "layers.1.codes"}


def test_bytes_read_are_counted(folder: Path) -> None:
    seen: list[int] = []
    checkpoint = open_checkpoint(folder, seen.append)
    checkpoint.get("layers.0.weight")
    checkpoint.get_slice("layers.0.bias", 0, 0, 2)
    assert seen == [6 * 4 * 2, 2 * 4]
    assert checkpoint.bytes_read == 56
    assert checkpoint.total_bytes == 48 + 24 + 30 + 4


def test_a_tensor_outlives_its_closed_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    with open_checkpoint(folder) as checkpoint:
        kept = checkpoint.get("layers.0.weight")
    assert torch.equal(kept, tensors["layers.0.weight"])


def test_a_file_that_vanished_is_named_when_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*tensor scalar"):
        checkpoint.get("scalar")


def test_the_info_comes_from_headers_and_json_files(folder: Path) -> None:
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "notes.json").write_text("[1, 2]")
    (folder / "results.json").write_text("not json")
    (folder / "big.json").write_text(json.dumps({"x": "y" * 2**20}))
    info = open_checkpoint(folder).info()
    assert info.path == folder
    assert info.hf_config["architectures"] == ["LlamaForCausalLM"]
    assert info.config_files == {"quantize_config.json": {"bits": 4}}
    assert info.tensor_shapes["layers.1.codes"] == (3, 2, 5)
    assert info.tensor_dtypes["layers.0.weight"] == "BF16"
    assert set(info.tensor_names) == set(open_checkpoint(folder).names())
    assert info.quantization_config is None


def test_the_info_reads_no_tensor(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.info()
    assert checkpoint.bytes_read == 0
    assert len(checkpoint.unread()) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_the_quantization_config_is_found(write_model: Writer, nested: bool) -> None:
    quantization = {"quant_method": "any", "bits": 4}
    inner = {"quantization_config": quantization}
    config = {"text_config": inner} if nested else inner
    info = open_checkpoint(write_model({"m.safetensors": {"a": torch.ones(1)}}, **config)).info()
    assert info.quantization_config == quantization


def test_a_quantization_config_of_another_type_is_refused(write_model: Writer) -> None:
    folder = write_model({"m.safetensors": {"a": torch.ones(1)}}, quantization_config="int4")
    with pytest.raises(CheckpointError, match="quantization_config must be a JSON object"):
        open_checkpoint(folder).info()


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000, '{"a": ' + "1" * 2**20 + "}"])
def test_a_damaged_config_is_refused_by_name(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder).info()


def test_a_damaged_quantize_config_is_refused_by_name(folder: Path) -> None:
    (folder / "quantize_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"quantize_config\.json is no JSON"):
        open_checkpoint(folder).info()


def test_a_missing_config_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(folder).info()


def test_a_single_file_may_be_opened_by_its_own_path(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "model-00002-of-00002.safetensors")
    assert set(checkpoint.names()) == {"layers.1.codes", "scalar"}


def test_the_report_says_what_was_loaded_and_what_was_not(folder: Path) -> None:
    with LoadProgress(folder) as progress:
        progress.checkpoint.get("layers.0.weight")
        progress.checkpoint.get("layers.0.bias")
        report = progress.report(missing=("lm_head.bias",))
    assert (report.num_tensors, report.num_bytes) == (2, 72)
    assert set(report.leftovers) == {"layers.1.codes", "scalar"}
    text = report.text()
    assert "Loaded 2 tensors" in text
    assert "2 tensors not used: " in text
    assert "1 tensors not there: lm_head.bias" in text


def test_the_report_gives_the_rate() -> None:
    report = LoadReport(path=Path("m"), num_tensors=1, num_bytes=3 * 10**9, seconds=2.0)
    assert report.gigabytes_per_second == 1.5
    assert report.text() == "Loaded 1 tensors, 3.000 GB, from m in 2.00 s (1.50 GB/s)"


def test_long_lists_of_names_are_cut() -> None:
    assert shorten_names([*"abcdefg"]) == "a, b, c, d, e and 2 more"
    assert shorten_names(["a"]) == "a"


def test_the_bar_is_drawn_only_when_it_is_wanted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LoadProgress(folder) as progress:
        progress.checkpoint.get("scalar")
    assert capsys.readouterr().err == ""
    with LoadProgress(folder, show=True) as progress:
        progress.checkpoint.get("scalar")
    assert "Loading" in capsys.readouterr().err
