"""A tiny model, its tokenizer, and a text to calibrate on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps under some old tree "


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[[Path, int], None]:
    """Writes a tokenizer of single characters, as many as asked for, into a model folder."""

    def write(folder: Path, size: int) -> None:
        tokenizer = {
            "version": "1.0",
            "added_tokens": [],
            "model": {
                "type": "BPE",
                "vocab": {chr(32 + i): i for i in range(size)},
                "merges": [],
            },
            "decoder": {"type": "Fuse"},
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')

    return write


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text long enough for eight rows of 32 characters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} {WORDS[i % 7 :]}" for i in range(40)))
    return str(path)


@pytest.fixture(scope="session")
def tiny_qwen(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[[Path, int], None]
) -> Path:
    """A bfloat16 Qwen2 with biases, tied head, 24 key outputs and 100 tokens: nothing fills 32."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=100,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.2)
    folder = tmp_path_factory.mktemp("qwen") / "model"
    model.save_pretrained(folder)
    byte_tokenizer(folder, 100)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[[Path, int], None]
) -> Path:
    """A bfloat16 Llama of two layers with grouped queries and a head of its own."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("llama") / "model"
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer(folder, 100)
    return folder


@pytest.fixture(scope="session")
def installed_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which every format, a stranger's too, counts as installed."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("awq", "gptq", "exl2", "nf4"):
        module = "ingle_quant_nf4" if name == "nf4" else f"ingle_quant_{name}.plugin"
        info = folder / f"ingle_quant_{name}-1.0.dist-info"
        info.mkdir()
        header = f"Metadata-Version: 2.1\nName: ingle-quant-{name}\nVersion: 1.0\n"
        (info / "METADATA").write_text(header)
        (info / "entry_points.txt").write_text(f"[ingle.plugins]\n{name} = {module}\n")
    return folder
