"""Files nobody should have made: config.json, safetensors headers, GGUF. Refused or read, never a
crash, and never more memory than the file has bytes for."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingle import CheckpointError, ConfigError
from ingle.checkpoint.generation_defaults import load_generation_defaults
from ingle.checkpoint.header import DTYPE_BYTES, read_header
from ingle.checkpoint.model_config import load_model_config
from ingle.demo_model.gguf import GGUFFile
from ingle.demo_model.hf_folder import write_hf_folder

common = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def refusal(work: Callable[[], object]) -> str:
    """Why ``work`` refuses, in words; nothing when it does what it should."""
    try:
        work()
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 2,
    "quantization_config": {"quant_method": "awq", "bits": 4},
}


@common
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), VALUES, max_size=4))
def test_a_config_is_read_or_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    reason = refusal(lambda: load_model_config(tmp_path))
    if reason:
        assert changes, reason
    else:
        config = load_model_config(tmp_path)
        assert config.num_layers > 0
        assert config.vocab_size > 0


@common
@given(data=st.binary(max_size=80) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_a_config_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises((CheckpointError, ConfigError)):
        load_model_config(tmp_path)


@common
@given(value=VALUES)
def test_sampling_defaults_are_read_or_refused(tmp_path: Path, value: Any) -> None:
    keys = ("temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id")
    for key in keys:
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
        reason = refusal(lambda: load_generation_defaults(tmp_path))
        assert not reason or key in reason


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BYTES, "F4", ""]) | VALUES,
        "shape": st.lists(st.integers(-1, 8) | NUMBERS, max_size=4) | VALUES,
        "data_offsets": st.lists(st.integers(0, 40) | NUMBERS, max_size=3) | VALUES,
    }
)


@common
@given(
    header=st.dictionaries(st.text(max_size=6), ENTRY | VALUES, max_size=3),
    num_bytes=st.integers(0, 64),
    lie=st.integers(-3, 3),
)
def test_a_safetensors_header_is_true_or_refused(
    tmp_path: Path, header: dict[str, Any], num_bytes: int, lie: int
) -> None:
    """What is accepted covers the file's bytes exactly, each once."""
    path = tmp_path / "m.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", max(0, len(text) + lie)) + text + b"\0" * num_bytes)
    reason = refusal(lambda: read_header(path))
    if reason:
        assert path.name in reason
    else:
        size = path.stat().st_size - 8 - len(text) - lie
        assert sum(entry.nbytes for entry in read_header(path).tensors.values()) == size


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file with metadata of every kind and one tensor."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.list", [1, 2, 3])
    writer.add_array("a.texts", ["x", "yz"])
    writer.add_tensor("w", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@common
@given(
    places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    wide=st.tuples(st.integers(0, 400), st.sampled_from([0, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
    cut=st.integers(0, 500),
)
def test_a_damaged_gguf_file_is_read_or_refused(
    tmp_path: Path,
    good_gguf: bytes,
    places: list[tuple[int, int]],
    wide: tuple[int, int],
    cut: int,
) -> None:
    content = bytearray(good_gguf)
    for place, value in places:
        content[place % len(content)] = value
    at = wide[0] % (len(content) - 8)
    if wide[0] % 2:
        content[at : at + 8] = struct.pack("<Q", wide[1])
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(content[: len(content) - cut] if cut < 100 else content))

    def read() -> None:
        for name, info in GGUFFile(path).tensors.items():
            assert GGUFFile(path).read(name).shape == info.shape

    reason = refusal(read)
    assert not reason or path.name in reason
    with pytest.raises(CheckpointError):
        write_hf_folder(path, tmp_path / "converted")


@common
@given(data=st.binary(max_size=120))
def test_any_bytes_are_no_gguf_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.gguf"
    for content in (data, b"GGUF" + data, b"GGUF\3\0\0\0" + data):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            write_hf_folder(path, tmp_path / "converted")
