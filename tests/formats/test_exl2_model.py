"""A whole EXL2 checkpoint through core's decoder: logits equal transformers' on dense weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseTorchKernel
from ingle.builtin.kv_native import NativeKVCache
from ingle.checkpoint.model_config import ModelConfig, load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.model.build import build_decoder
from ingle.model.decoder import Decoder
from ingle.model.linear import ROW_RANGES, PreparedWeight
from ingle.model.weights import WeightSource
from ingle.plugin import DeviceInfo, KVCacheFormat, KVCacheGeometry, LinearWeight
from ingle_kv_fp8.format import Fp8E4M3Format, Fp8E5M2Format
from ingle_quant_exl2.cpu import Exl2CpuKernel
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.weight import Exl2Weight

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "exl2"
FOLDER = VECTORS / "tiny_llama_exl2"
CPU = DeviceInfo(type="cpu")
BLOCK, TABLE = 8, (5, 2)


def prepare(weight: LinearWeight) -> PreparedWeight:
    kernel = Exl2CpuKernel() if isinstance(weight, Exl2Weight) else DenseTorchKernel()
    prepared = kernel.prepare(weight)
    return PreparedWeight(weight=prepared, kernels=(kernel,) * len(ROW_RANGES))


def load_model(dtype: torch.dtype, folder: Path = FOLDER) -> tuple[Decoder, ModelConfig]:
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.info()
        config = load_model_config(folder, info)
        loaders = [Exl2Format().open(info), DenseFormat().open(info)]
        source = WeightSource(checkpoint, loaders, prepare, dtype, CPU)
        model = build_decoder(
            config, source, lambda window: PagedCPUAttention(config.head_dim**-0.5, window), 64
        )
    return model, config


def caches_for(config: ModelConfig, form: KVCacheFormat, dtype: torch.dtype) -> list[LayerCache]:
    def store(side: str) -> object:
        geometry = KVCacheGeometry(
            side=side,  # type: ignore[arg-type]
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK,
            dtype=dtype,
        )
        return form.allocate(geometry, 8, CPU)

    return [
        LayerCache(k_format=form, v_format=form, k_store=store("k"), v_store=store("v"))  # type: ignore[arg-type]
        for _ in range(config.num_layers)
    ]


def batch(token_ids: torch.Tensor, start: int, stop: int) -> ForwardBatch:
    slots = [TABLE[place // BLOCK] * BLOCK + place % BLOCK for place in range(start, stop)]
    span = SequenceSpan(
        start=0, stop=stop - start, seq_len=stop, block_table=TABLE, first_block=None
    )
    return ForwardBatch(
        token_ids=token_ids[start:stop],
        positions=torch.arange(start, stop),
        slot_mapping=torch.tensor(slots),
        spans=(span,),
    )


@pytest.mark.parametrize("chunk", [16, 5, 1])
@pytest.mark.parametrize(
    ("dtype", "form", "bound"),
    [
        (torch.float32, NativeKVCache(), 2e-6),
        (torch.bfloat16, NativeKVCache(), 2e-2),
        (torch.float32, Fp8E4M3Format(), 6e-2),
        (torch.bfloat16, Fp8E4M3Format(), 6e-2),
        (torch.float32, Fp8E5M2Format(), 1.2e-1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@torch.inference_mode()
def test_logits_are_transformers_for_every_cache_type_and_chunk_size(
    dtype: torch.dtype, form: KVCacheFormat, bound: float, chunk: int
) -> None:
    model, config = load_model(dtype)
    expected = load_file(FOLDER / "expected" / "logits.safetensors")
    for token_ids, wanted in zip(expected["input_ids"], expected["logits"], strict=True):
        caches = caches_for(config, form, dtype)
        logits = []
        for start in range(0, len(token_ids), chunk):
            step = batch(token_ids, start, min(start + chunk, len(token_ids)))
            logits.append(model.logits(model.hidden_states(step, caches)))
        found = torch.cat(logits)
        assert found.shape == wanted.shape
        assert float((found - wanted).norm() / wanted.norm()) < bound


@torch.inference_mode()
def test_a_qwen3_checkpoint_with_norms_repeated_per_head_gives_transformers_logits() -> None:
    folder = VECTORS / "tiny_qwen3_exl2"
    model, config = load_model(torch.float32, folder)
    expected = load_file(folder / "expected" / "logits.safetensors")
    for token_ids, wanted in zip(expected["input_ids"], expected["logits"], strict=True):
        caches = caches_for(config, NativeKVCache(), torch.float32)
        step = batch(token_ids, 0, len(token_ids))
        found = model.logits(model.hidden_states(step, caches))
        assert float((found - wanted).norm() / wanted.norm()) < 2e-6
