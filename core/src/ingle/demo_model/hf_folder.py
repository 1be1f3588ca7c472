"""From a Llama-architecture GGUF file with a byte-level BPE tokenizer to a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from ingle.demo_model.gguf import GGUFFile
from ingle.demo_model.safetensors_writer import write_bfloat16_safetensors
from ingle.demo_model.tokenizer_files import write_tokenizer_files
from ingle.errors import CheckpointError

_LAYER_TENSORS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

DAMAGE: Final = (LookupError, TypeError, ValueError, ArithmeticError)
"""What reading metadata raises where a key is missing or its value is of the wrong kind."""


def write_hf_folder(source: Path, folder: Path) -> None:
    """Writes config, weights, tokenizer and generation config of ``source`` into ``folder``.

    Raises:
        CheckpointError: When ``source`` is no Llama-architecture GGUF file.
    """
    gguf = GGUFFile(source)
    try:
        _write_parts(source, gguf, folder)
    except DAMAGE as error:
        raise CheckpointError(
            f"{source} cannot be converted: its metadata lacks something or is damaged "
            f"({type(error).__name__}: {error})."
        ) from error


def _write_parts(source: Path, gguf: GGUFFile, folder: Path) -> None:
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{source} has architecture {architecture!r}; the demo is a llama.")
    config = hf_config(gguf)
    names = _tensor_names(config["num_hidden_layers"], "output.weight" in gguf.tensors)
    shapes = {name: gguf.tensors[stored].shape for name, stored in names.items()}
    write_bfloat16_safetensors(folder / "model.safetensors", shapes, _weights(gguf, names, config))
    write_tokenizer_files(gguf.metadata, folder)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """``config.json`` as transformers' LlamaConfig spells it, from GGUF metadata."""
    data = gguf.metadata
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": data["tokenizer.ggml.bos_token_id"],
        "eos_token_id": data["tokenizer.ggml.eos_token_id"],
        "pad_token_id": data["tokenizer.ggml.padding_token_id"],
        "head_dim": data["llama.embedding_length"] // data["llama.attention.head_count"],
        "hidden_act": "silu",
        "hidden_size": data["llama.embedding_length"],
        "intermediate_size": data["llama.feed_forward_length"],
        "max_position_embeddings": data["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": data["llama.attention.head_count"],
        "num_hidden_layers": data["llama.block_count"],
        "num_key_value_heads": data["llama.attention.head_count_kv"],
        "rms_norm_eps": _shortest(data["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(data["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "vocab_size": data["llama.vocab_size"],
    }


def undo_rope_permutation(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in Hugging Face's order: [N, K] in and out.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, transformers rows i and i + D/2;
    llama.cpp's converter reorders the rows of each head accordingly, and this undoes it.
    """
    rows, columns = weight.shape
    by_head = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return by_head.transpose(1, 2).reshape(rows, columns)


def _tensor_names(num_layers: int, has_head: bool) -> dict[str, str]:
    """Hugging Face tensor name -> GGUF tensor name, in the order they are written."""
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    for layer in range(num_layers):
        for ours, theirs in _LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    names["model.norm.weight"] = "output_norm.weight"
    if has_head:
        names["lm_head.weight"] = "output.weight"
    return names


def _weights(
    gguf: GGUFFile, names: dict[str, str], config: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for name, stored in names.items():
        weight = gguf.read(stored)
        if ".q_proj." in name:
            weight = undo_rope_permutation(weight, config["num_attention_heads"])
        elif ".k_proj." in name:
            weight = undo_rope_permutation(weight, config["num_key_value_heads"])
        yield weight


def _shortest(value: float) -> float:
    """A float32 read back as the shortest decimal that rounds to it: 1e-05, not 9.9999997e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if torch.tensor(candidate, dtype=torch.float32).item() == value:
            return candidate
    return value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
