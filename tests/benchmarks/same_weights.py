"""Model folders with which Ingle and llama.cpp can be measured on the same weights.

    python tests/benchmarks/same_weights.py random DEMO OUT     # the 1.07B shape of random weights
    python tests/benchmarks/same_weights.py gptq FILE.gguf DENSE OUT

``gptq`` reads a Q4_0 file that llama-quantize has made of the folder DENSE and writes the same
values in GPTQ's layout: Q4_0 stores d * (q - 8) with one fp16 d for 32 values along a row, which
is symmetric 4 bits in groups of 32, bit for bit. The head becomes 8 bits: such files keep it as
Q8_0 (d * q, groups of 32), or as Q6_K (d * s * q, groups of 16; d * s is rounded to fp16). The
embedding, the same tensor there, becomes bf16. Needs the package gguf.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from ingle.demo_model.hf_folder import undo_rope_permutation

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GROUP = 32
ZEROS = {4: 0x77777777, 8: 0x7F7F7F7F}
"""Zero points of 8 and of 128, each stored minus one, in a word."""


def copy_small_files(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Tokenizer and the like, and a config."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config, indent=2))


def write_random(demo: Path, target: Path) -> None:
    """The shape above with normal weights of deviation 0.02, in bf16, and the demo's tokenizer."""
    config = json.loads((demo / "config.json").read_text()) | SHAPE
    copy_small_files(demo, target, config)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * 0.02).to(torch.bfloat16)

    hidden, inner, keys = 2048, 5632, 256
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden).bfloat16()
    tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def codes_and_scales(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K] of 0..15 and scales fp16 [N, K/32] of a Q4_0 tensor."""
    blocks = np.array(tensor.data).reshape(-1, 18)
    columns = int(tensor.shape[0])
    scales = torch.from_numpy(blocks[:, :2].copy()).view(torch.float16).view(-1, columns // GROUP)
    packed = torch.from_numpy(blocks[:, 2:].copy())
    codes = torch.cat((packed & 15, packed >> 4), 1).view(-1, columns)
    return codes, scales


def bytes_and_scales(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K] of 0..255, 128 being zero, and scales fp16 [N, G] of a Q8_0 tensor, or of
    a Q6_K one (blocks of 210 bytes for 256 values: codes, 16 int8 scales, fp16 d)."""
    columns = int(tensor.shape[0])
    values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
    if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
        first = torch.from_numpy(np.array(tensor.data).reshape(-1, 34)[:, :2].copy())
        scales = first.view(torch.float16).float()
    else:
        blocks = torch.from_numpy(np.array(tensor.data).reshape(-1, 210)[:, 192:].copy())
        scales = blocks[:, :16].view(torch.int8) * blocks[:, 16:].contiguous().view(torch.float16)
    scales = scales.float().view(-1, 1)
    codes = (values.view(scales.shape[0], -1) / scales).nan_to_num(0).round() + 128
    return codes.to(torch.uint8).view(-1, columns), scales.half().view(values.shape[0], -1)


def as_gptq(codes: torch.Tensor, scales: torch.Tensor, bits: int = 4) -> dict[str, torch.Tensor]:
    """GPTQ's tensors: qweight int32 [K * bits / 32, N], scales fp16 [K/32, N], zeros, groups."""
    rows, columns = codes.shape
    groups = scales.shape[1]
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    by_word = codes.T.reshape(-1, 32 // bits, rows).long()
    words = (by_word << shifts[None, :, None]).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return {
        "qweight": words.contiguous(),
        "scales": scales.T.contiguous(),
        "qzeros": torch.full((groups, rows * bits // 32), ZEROS[bits], dtype=torch.int32),
        "g_idx": (torch.arange(columns) // (columns // groups)).int(),
    }


def write_gptq(file: Path, dense: Path, target: Path) -> None:
    """The weights of ``file`` in a folder that Ingle loads."""
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "lm_head": True,
    }
    config["tie_word_embeddings"] = False
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    head, head_scales = bytes_and_scales(stored["token_embd.weight"])
    head_rule = {"bits": 8, "group_size": head.shape[1] // head_scales.shape[1]}
    config["quantization_config"]["dynamic"] = {"lm_head": head_rule}
    copy_small_files(dense, target, config)

    def plain(name: str) -> torch.Tensor:
        tensor = stored[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values)).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": plain("token_embd.weight"),
        "model.norm.weight": plain("output_norm.weight"),
    }
    for layer in range(config["num_hidden_layers"]):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        tensors[f"{here}input_layernorm.weight"] = plain(f"{there}attn_norm.weight")
        tensors[f"{here}post_attention_layernorm.weight"] = plain(f"{there}ffn_norm.weight")
        for ours, theirs in LINEARS.items():
            codes, scales = codes_and_scales(stored[f"{there}{theirs}.weight"])
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(theirs)
            if heads is not None:
                codes, scales = (undo_rope_permutation(t, config[heads]) for t in (codes, scales))
            for part, value in as_gptq(codes, scales).items():
                tensors[f"{here}{ours}.{part}"] = value
    for part, value in as_gptq(head, head_scales, bits=8).items():
        tensors[f"lm_head.{part}"] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    if kind == "random":
        write_random(*map(Path, paths))
    else:
        write_gptq(*map(Path, paths))
