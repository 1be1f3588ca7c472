"""Which files of a folder make up a model: whole, sharded, stale, mixed and missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingle import CheckpointError
from ingle.checkpoint.safetensors import open_checkpoint

Writer = Callable[..., Path]
A = {"a": torch.zeros(2)}
B = {"b": torch.ones(3)}
C = {"c": torch.ones(4)}


def shard(number: int, total: int, stem: str = "model") -> str:
    return f"{stem}-{number:05d}-of-{total:05d}.safetensors"


def index(folder: Path, files: dict[str, str]) -> None:
    content = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_a_single_file_is_read(write_model: Writer) -> None:
    assert open_checkpoint(write_model({"model.safetensors": A})).names() == ("a",)


def test_a_single_file_of_any_name_is_read(write_model: Writer) -> None:
    folder = write_model({"gptq_model-4bit-128g.safetensors": A})
    assert open_checkpoint(folder).names() == ("a",)


def test_shards_with_an_index_are_merged_in_file_order(write_model: Writer) -> None:
    folder = write_model({shard(1, 2): B, shard(2, 2): A})
    index(folder, {"a": shard(2, 2), "b": shard(1, 2)})
    assert open_checkpoint(folder).names() == ("b", "a")


def test_shards_without_an_index_are_merged(write_model: Writer) -> None:
    assert open_checkpoint(write_model({shard(1, 2): A, shard(2, 2): B})).names() == ("a", "b")


def test_a_missing_shard_is_refused_by_name_without_an_index(write_model: Writer) -> None:
    folder = write_model({shard(1, 3): A, shard(3, 3): B})
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(folder)


def test_a_missing_last_shard_is_refused_by_name(write_model: Writer) -> None:
    folder = write_model({shard(1, 3): A, shard(2, 3): B})
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is missing"):
        open_checkpoint(folder)


def test_a_missing_shard_is_refused_by_name_with_an_index(write_model: Writer) -> None:
    folder = write_model({shard(1, 3): A, shard(3, 3): B})
    index(folder, {"a": shard(1, 3), "b": shard(3, 3), "c": shard(2, 3)})
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(folder)


def test_a_missing_file_that_is_not_numbered_is_refused_by_name(write_model: Writer) -> None:
    folder = write_model({"first.safetensors": A})
    index(folder, {"a": "first.safetensors", "b": "second.safetensors"})
    with pytest.raises(CheckpointError, match=r"second\.safetensors is missing"):
        open_checkpoint(folder)


def test_a_cut_index_does_not_hide_a_missing_shard(write_model: Writer) -> None:
    folder = write_model({shard(1, 2): A})
    index(folder, {"a": shard(1, 2)})
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        open_checkpoint(folder)


def test_a_stale_index_of_a_model_now_in_one_file_is_ignored(write_model: Writer) -> None:
    folder = write_model({"model.safetensors": A})
    index(folder, {"a": shard(1, 2), "b": shard(2, 2)})
    assert open_checkpoint(folder).names() == ("a",)


def test_a_stale_index_of_a_model_now_cut_otherwise_is_ignored(write_model: Writer) -> None:
    folder = write_model({shard(1, 2): A, shard(2, 2): B})
    index(folder, {"a": shard(1, 5), "b": shard(4, 5)})
    assert open_checkpoint(folder).names() == ("a", "b")


def test_exl2_output_wins_over_the_unquantised_leftovers(write_model: Writer) -> None:
    folder = write_model({"output.safetensors": A, shard(1, 2): {"a": torch.ones(9)}})
    index(folder, {"a": shard(1, 2), "b": shard(2, 2)})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == ("a",)
    assert checkpoint.get("a").shape == (2,)


def test_exl2_output_shards_must_be_complete(write_model: Writer) -> None:
    folder = write_model({shard(1, 2, "output"): A, "model.safetensors": B})
    with pytest.raises(CheckpointError, match=r"output-00002-of-00002\.safetensors is missing"):
        open_checkpoint(folder)


def test_exl2_output_with_a_stale_index_is_read(write_model: Writer) -> None:
    folder = write_model({shard(1, 2, "output"): A, shard(2, 2, "output"): B})
    index(folder, {"x": shard(1, 2), "y": shard(2, 2)})
    assert open_checkpoint(folder).names() == ("a", "b")


def test_consolidated_copies_are_left_out(write_model: Writer) -> None:
    folder = write_model({"model.safetensors": A, "consolidated.safetensors": B})
    assert open_checkpoint(folder).names() == ("a",)


def test_files_the_index_does_not_name_are_left_out(write_model: Writer) -> None:
    folder = write_model({shard(1, 1): A, "extra.safetensors": {"a": torch.ones(5)}})
    index(folder, {"a": shard(1, 1)})
    assert open_checkpoint(folder).names() == ("a",)


def test_a_tensor_in_two_files_is_refused_by_all_three_names(write_model: Writer) -> None:
    folder = write_model({"one.safetensors": A, "two.safetensors": {**A, **C}})
    with pytest.raises(CheckpointError, match=r"Tensor a is in both .*one\.s.* and .*two\.s"):
        open_checkpoint(folder)


def test_every_header_is_checked_before_anything_is_read(write_model: Writer) -> None:
    folder = write_model({shard(1, 2): A, shard(2, 2): B})
    broken = folder / shard(2, 2)
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ""])
def test_an_index_may_only_name_files_beside_itself(write_model: Writer, name: str) -> None:
    folder = write_model({"model.safetensors": A})
    index(folder, {"a": name})
    with pytest.raises(CheckpointError, match="may only name files beside itself"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": []}}'])
def test_a_damaged_index_is_refused_by_name(write_model: Writer, text: str) -> None:
    folder = write_model({"model.safetensors": A})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        open_checkpoint(folder)


def test_a_set_of_a_billion_files_is_refused_at_once(write_model: Writer) -> None:
    folder = write_model({"model-00001-of-999999.safetensors": A})
    with pytest.raises(CheckpointError, match="999999 files"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_folder_of_pickles_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pickle.*python -c .*save_pretrained"):
        open_checkpoint(tmp_path)


def test_a_folder_of_gguf_files_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"GGUF.*safetensors"):
        open_checkpoint(tmp_path)


def test_pickles_beside_safetensors_are_left_alone(write_model: Writer) -> None:
    folder = write_model({"model.safetensors": A})
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert open_checkpoint(folder).names() == ("a",)


def test_an_empty_folder_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        open_checkpoint(tmp_path / "nowhere")
