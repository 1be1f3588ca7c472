"""A packed model of one layer, and the plugins that read it; fixtures of both gates."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

PACKER = Path(__file__).parents[1] / "formats" / "round_to_nearest.py"
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
PACKAGES = {
    "ingle-quant-gptq": ("gptq", "ingle_quant_gptq.plugin"),
    "ingle-kv-fp8": ("fp8", "ingle_kv_fp8.plugin"),
}


def install_plugins(site: Path) -> None:
    """What makes the format plugins look installed, once ``site`` is on the path."""
    for package, (name, module) in PACKAGES.items():
        folder = site / f"{package.replace('-', '_')}-0.1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n"
        )
        (folder / "entry_points.txt").write_text(f"[ingle.plugins]\n{name} = {module}\n")


def write_packed(folder: Path, tokenizer: Path) -> None:
    """A random Llama of one layer, packed as GPTQ with 4 bits; the down projection act-order; and
    the tokenizer of another model's folder."""
    spec = importlib.util.spec_from_file_location("round_to_nearest", PACKER)
    assert spec is not None
    assert spec.loader is not None
    packer: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        linear = name.removesuffix(".weight")
        if not linear.endswith("_proj"):
            tensors[name] = parameter.detach().half()
            continue
        order = torch.randperm(parameter.shape[1]) if linear.endswith("down_proj") else None
        packed = packer.pack_gptq(parameter.detach(), 4, 32, False, order)
        tensors |= {f"{linear}.{role}": tensor for role, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    config = {
        **model.config.to_dict(),
        "torch_dtype": "float16",
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokenizer / file).read_bytes())
