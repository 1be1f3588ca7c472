"""Packed checkpoints of a family that only transformers' code knows: the backend's linears are
Ingle's, and logits equal transformers' on the weights that the files stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import OlmoeConfig, OlmoeForCausalLM, StableLmConfig, StableLmForCausalLM

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseTorchKernel
from ingle.builtin.kv_native import NativeKVCache
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.model.linear import ROW_RANGES, PreparedWeight
from ingle.model.transformers_backend.config import load_transformers_config
from ingle.model.transformers_backend.model import build_transformers_model
from ingle.model.weights import WeightSource
from ingle.plugin import DeviceInfo, KernelUse, KVCacheGeometry, LinearWeight, WeightFormat
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

CPU = DeviceInfo(type="cpu")
TOKENS = torch.tensor([1, 17, 42, 99, 3, 64, 127, 5, 5, 80, 33, 12, 71, 110, 2, 9, 58, 100, 21, 4])
SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FORMATS: dict[str, WeightFormat] = {"awq": AwqFormat(), "gptq": GptqFormat()}


def stablelm() -> torch.nn.Module:
    return StableLmForCausalLM(StableLmConfig(**SIZE, use_qkv_bias=True)).eval()


def olmoe() -> torch.nn.Module:
    return OlmoeForCausalLM(OlmoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2)).eval()


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter as checkpoints name it: stacked experts one by one, as views."""
    named: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            named[name] = value
            continue
        block = name.rpartition(".")[0]
        for index, expert in enumerate(value):
            if name.endswith("down_proj"):
                named[f"{block}.{index}.down_proj.weight"] = expert
            else:
                gate, up = expert.chunk(2)
                named[f"{block}.{index}.gate_proj.weight"] = gate
                named[f"{block}.{index}.up_proj.weight"] = up
    return named


def pack(model: torch.nn.Module, kind: str, folder: Path, packer: Any) -> None:
    """Saves ``model`` with its projections packed, and gives it the weights these stand for."""
    tensors = {}
    for name, value in named_weights(model).items():
        linear = name.removesuffix(".weight")
        if not (linear.endswith("_proj") and value.dim() == 2):
            tensors[name] = value.clone()
            continue
        options = (4, 32, False) if kind == "awq" else (4, 32, True, None)
        packed = (
            packer.pack_awq_gemm(value, 32) if kind == "awq" else packer.pack_gptq(value, *options)
        )
        value.copy_(packer.rounded(value, *options))
        tensors |= {f"{linear}.{role}": tensor for role, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    config: Any = model.config
    method = {"quant_method": kind, "bits": 4, "group_size": 32}
    raw = {**config.to_dict(), "torch_dtype": "float32", "quantization_config": method}
    raw["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(raw))


def prepare(weight: LinearWeight) -> PreparedWeight:
    """The weight for the first kernel that supports it."""
    use = KernelUse(device=CPU, dtype=torch.float32, rows=range(1, 1 << 30))
    kernels = [*ingle_matmul_kernels(CPU), DenseTorchKernel()]
    kernel = next(k for k in kernels if k.supports(weight, use))
    return PreparedWeight(weight=kernel.prepare(weight), kernels=(kernel,) * len(ROW_RANGES))


def logits_of(folder: Path, weight_format: WeightFormat) -> torch.Tensor:
    """Ingle's logits after every token of TOKENS."""
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.info()
        config = load_transformers_config(folder, info)
        loaders = [weight_format.open(info), DenseFormat().open(info)]
        source = WeightSource(checkpoint, loaders, prepare, torch.float32, CPU)
        scale = config.head_dim**-0.5
        raw = dict(info.hf_config)
        model = build_transformers_model(
            "config.json", raw, config, source, lambda w: PagedCPUAttention(scale, w), 64
        )
    form = NativeKVCache()
    geometries = [
        KVCacheGeometry(
            side=side,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=32,
            dtype=torch.float32,
        )
        for side in ("k", "v")
    ]
    caches = []
    for _ in range(config.num_layers):
        k, v = (form.allocate(geometry, 2, CPU) for geometry in geometries)
        caches.append(LayerCache(k_format=form, v_format=form, k_store=k, v_store=v))
    places = torch.arange(len(TOKENS))
    span = SequenceSpan(
        start=0, stop=len(TOKENS), seq_len=len(TOKENS), block_table=(1,), first_block=1
    )
    batch = ForwardBatch(
        token_ids=TOKENS, positions=places, slot_mapping=places + 32, spans=(span,)
    )
    with torch.inference_mode():
        return model.logits(model.hidden_states(batch, caches))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("make", [stablelm, olmoe])
def test_packed_linears_and_experts_are_ingles_own(
    make: Any, kind: str, tmp_path: Path, round_to_nearest: Any
) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.inference_mode():
        pack(model, kind, tmp_path, round_to_nearest)
        wanted = model(TOKENS[None]).logits[0]
    found = logits_of(tmp_path, FORMATS[kind])
    assert (found - wanted).norm() / wanted.norm() < 5e-6
