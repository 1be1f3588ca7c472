"""``tokenizer.json`` and its companions from the tokenizer metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ingle.errors import CheckpointError

_CONTROL: Final = 3
"""ggml's token type for tokens such as ``<|im_end|>``."""


def write_tokenizer_files(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Raises:
        CheckpointError: When the GGUF file's tokenizer is not SmolLM's byte-level BPE.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise CheckpointError(f"The GGUF tokenizer is {kind}/{pre}; the demo needs gpt2/smollm.")
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    special = _special_tokens(metadata)
    config = {
        **special,
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"],
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "special_tokens_map.json", special)


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE with every digit a word of its own, as SmolLM's tokenizer has it.

    llama.cpp calls this pre-tokenizer ``smollm``: first single digits are cut out, then GPT-2's
    word pattern splits what lies between.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        if kind == _CONTROL
    ]
    tokenizer.add_special_tokens(control)
    return tokenizer


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    return {ours: tokens[metadata[f"tokenizer.ggml.{theirs}"]] for ours, theirs in keys.items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
