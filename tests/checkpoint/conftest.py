"""Small checkpoints and tokenizers, made by the libraries that define their formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CORPUS = (
    "The quick brown fox jumps over the lazy dog. the cat, the hat; a bat and a rat!\n"
    "user: hello there, how are you today? assistant: I am fine, thank you very much.\n"
    "naïve café über straße — über alles 1 2 3 4 5 6 7 8 9 0\n"
) * 20


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder with a config and one file per shard: ``{file name: {tensor: value}}``."""

    def write(shards: dict[str, dict[str, torch.Tensor]], **config: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **config}))
        for name, tensors in shards.items():
            save_file(tensors, folder / name, metadata={"format": "pt"})
        return folder

    return write


def train_sentencepiece_like(style: str) -> Tokenizer:
    """A BPE with byte fallback. ``legacy`` puts the space in by a normaliser, as Llama 2's file
    does; ``metaspace`` by a pre-tokenizer, as newer files do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    if style == "legacy":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    # Training marks its first tokens as special; a real file does so for three of them only.
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.fixture(scope="session", params=["legacy", "metaspace"])
def sentencepiece_dir(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    """A folder with a SentencePiece-like tokenizer, in both ways files spell one."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    train_sentencepiece_like(request.param).save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
            "{% endfor %}"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
