"""Whole AWQ and GPTQ checkpoints through core's decoder: logits equal transformers' on the
weights that the files stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseTorchKernel
from ingle.builtin.kv_native import NativeKVCache
from ingle.checkpoint.model_config import ModelConfig, load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.model.build import build_decoder
from ingle.model.decoder import Decoder
from ingle.model.linear import ROW_RANGES, PreparedWeight
from ingle.model.weights import WeightSource
from ingle.plugin import DeviceInfo, KernelUse, KVCacheGeometry, LinearWeight, WeightFormat
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

CPU = DeviceInfo(type="cpu")
BLOCK, TABLE = 16, (3, 1)
TOKENS = torch.tensor([1, 17, 42, 99, 3, 64, 127, 5, 5, 80, 33, 12, 71, 110, 2, 9, 58, 100, 21, 4])
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
KINDS: dict[str, WeightFormat] = {
    "awq": AwqFormat(),
    "gptq": GptqFormat(),
    "gptq act-order": GptqFormat(),
}


@pytest.fixture(scope="module", params=KINDS)
def model_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, round_to_nearest: Any
) -> tuple[Path, WeightFormat, torch.Tensor]:
    """A packed random Llama, its format, and transformers' logits for what it stands for."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    tensors = {}
    for name, parameter in model.named_parameters():
        linear = name.removesuffix(".weight")
        if not linear.endswith("_proj"):
            tensors[name] = parameter.detach().clone()
            continue
        packed, dense = pack_linear(round_to_nearest, request.param, linear, parameter.detach())
        parameter.data.copy_(dense)
        tensors |= {f"{linear}.{role}": tensor for role, tensor in packed.items()}
    folder = tmp_path_factory.mktemp("packed")
    save_file(tensors, folder / "model.safetensors")
    method = {"quant_method": request.param.split()[0], "bits": 4, "group_size": 32}
    config = {**model.config.to_dict(), "torch_dtype": "float32", "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        logits = model(TOKENS.unsqueeze(0)).logits[0]
    return folder, KINDS[request.param], logits


def pack_linear(
    packer: Any, kind: str, name: str, weight: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one linear, and the weight they stand for; widths differ as in real files."""
    if kind == "awq":
        return packer.pack_awq_gemm(weight, 32), packer.rounded(weight, 4, 32, False)
    order = torch.randperm(weight.shape[1]) if "act-order" in kind else None
    options = (8 if name.endswith("down_proj") else 4, 32, "mlp" in name, order)
    return packer.pack_gptq(weight, *options), packer.rounded(weight, *options)


def prepare_for(dtype: torch.dtype) -> Callable[[LinearWeight], PreparedWeight]:
    """Prepares each weight for the first kernel that supports it."""
    kernels = [*ingle_matmul_kernels(CPU), DenseTorchKernel()]
    use = KernelUse(device=CPU, dtype=dtype, rows=range(1, 1 << 30))

    def prepare(weight: LinearWeight) -> PreparedWeight:
        kernel = next(k for k in kernels if k.supports(weight, use))
        ready = kernel.prepare(weight)
        return PreparedWeight(weight=ready, kernels=(kernel,) * len(ROW_RANGES))

    return prepare


def load_model(
    folder: Path, weight_format: WeightFormat, dtype: torch.dtype
) -> tuple[Decoder, ModelConfig]:
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.info()
        config = load_model_config(folder, info)
        loaders = [weight_format.open(info), DenseFormat().open(info)]
        source = WeightSource(checkpoint, loaders, prepare_for(dtype), dtype, CPU)
        scale = config.head_dim**-0.5
        model = build_decoder(config, source, lambda window: PagedCPUAttention(scale, window), 64)
    return model, config


def caches_for(config: ModelConfig, dtype: torch.dtype) -> list[LayerCache]:
    form = NativeKVCache()
    sizes: dict[str, Any] = {
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "block_size": BLOCK,
        "dtype": dtype,
    }
    k, v = (KVCacheGeometry(side="k", **sizes), KVCacheGeometry(side="v", **sizes))
    return [
        LayerCache(
            k_format=form,
            v_format=form,
            k_store=form.allocate(k, 4, CPU),
            v_store=form.allocate(v, 4, CPU),
        )
        for _ in range(config.num_layers)
    ]


def batch(start: int, stop: int) -> ForwardBatch:
    slots = [TABLE[place // BLOCK] * BLOCK + place % BLOCK for place in range(start, stop)]
    span = SequenceSpan(
        start=0, stop=stop - start, seq_len=stop, block_table=TABLE, first_block=None
    )
    return ForwardBatch(
        token_ids=TOKENS[start:stop],
        positions=torch.arange(start, stop),
        slot_mapping=torch.tensor(slots),
        spans=(span,),
    )


@pytest.mark.parametrize("chunk", [20, 7, 1])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_logits_are_transformers_on_the_weights_the_file_stands_for(
    model_folder: tuple[Path, WeightFormat, torch.Tensor],
    dtype: torch.dtype,
    bound: float,
    chunk: int,
) -> None:
    folder, weight_format, wanted = model_folder
    model, config = load_model(folder, weight_format, dtype)
    caches = caches_for(config, dtype)
    logits = []
    for start in range(0, len(TOKENS), chunk):
        step = batch(start, min(start + chunk, len(TOKENS)))
        logits.append(model.logits(model.hidden_states(step, caches)))
    found = torch.cat(logits).float()
    assert float((found - wanted).norm() / wanted.norm()) < bound
