"""Model folders that have every header and no weights: the data section is a hole in the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

SIZES = {"F16": 2, "BF16": 2, "I32": 4, "I16": 2}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
PackLinear = Callable[[str, int, int], Tensors]

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_3_70B = {
    **LLAMA_3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "torch_dtype": "float16",
}

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 128,
    "hidden_act": "silu",
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def dense(name: str, outputs: int, inputs: int) -> Tensors:
    """bf16 [N, K]."""
    return {f"{name}.weight": ("BF16", (outputs, inputs))}


def awq(name: str, outputs: int, inputs: int) -> Tensors:
    """4 bits in groups of 128, as AutoAWQ's gemm version stores them."""
    groups = inputs // 128
    return {
        f"{name}.qweight": ("I32", (inputs, outputs // 8)),
        f"{name}.qzeros": ("I32", (groups, outputs // 8)),
        f"{name}.scales": ("F16", (groups, outputs)),
    }


def gptq(name: str, outputs: int, inputs: int) -> Tensors:
    """4 bits in groups of 128, with a group index, as AutoGPTQ stores them."""
    groups = inputs // 128
    return {
        f"{name}.qweight": ("I32", (inputs // 8, outputs)),
        f"{name}.qzeros": ("I32", (groups, outputs // 8)),
        f"{name}.scales": ("F16", (groups, outputs)),
        f"{name}.g_idx": ("I32", (inputs,)),
    }


def exl2(bits: float) -> PackLinear:
    """``bits`` per weight in groups of 128, scale codes included."""

    def pack(name: str, outputs: int, inputs: int) -> Tensors:
        groups = inputs // 128
        words = round(inputs * (bits - 4 / 128) / 32)
        return {
            f"{name}.q_weight": ("I32", (words, outputs)),
            f"{name}.q_scale": ("I32", (groups, outputs // 8)),
            f"{name}.q_scale_max": ("F16", (groups,)),
            f"{name}.q_groups": ("I16", (2 * groups,)),
            f"{name}.q_invperm": ("I32", (inputs,)),
        }

    return pack


def llama_tensors(config: dict[str, Any], linear: PackLinear, head: PackLinear) -> Tensors:
    """Every tensor of a Llama of that shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: Tensors = dense("model.embed_tokens", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (outputs, inputs) in shapes.items():
            found |= linear(f"{prefix}.{name}", outputs, inputs)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = ("BF16", (hidden,))
    found["model.norm.weight"] = ("BF16", (hidden,))
    return found | head("lm_head", config["vocab_size"], hidden)


def qwen3_moe_tensors(config: dict[str, Any], linear: PackLinear, head: PackLinear) -> Tensors:
    """Every tensor of a Qwen3 mixture of experts of that shape; routers are never packed."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    queries, keys = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    expert = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    found: Tensors = dense("model.embed_tokens", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in attention.items():
            found |= linear(f"{prefix}.self_attn.{name}", *shape)
        for number in range(config["num_experts"]):
            for name, shape in expert.items():
                found |= linear(f"{prefix}.mlp.experts.{number}.{name}", *shape)
        found |= dense(f"{prefix}.mlp.gate", config["num_experts"], hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = ("BF16", (hidden,))
        for norm in ("q_norm", "k_norm"):
            found[f"{prefix}.self_attn.{norm}.weight"] = ("BF16", (config["head_dim"],))
    found["model.norm.weight"] = ("BF16", (hidden,))
    return found | head("lm_head", config["vocab_size"], hidden)


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, name: str) -> Path:
    """``config.json`` and one safetensors file whose data is never written."""
    header: dict[str, Any] = {}
    end = 0
    for tensor, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * SIZES[dtype]
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / name).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder
