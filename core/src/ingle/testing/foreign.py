"""Checkpoints of other people's formats, headers only: what a format must decline.

One linear ``model.layers.0.mlp.down_proj`` with 128 inputs (K) and 64 outputs (N), as each tool
writes it. Layouts: specs/awq_gptq.md sections 2 to 4, specs/exl2.md sections 1, 2 and 13; fp8,
compressed-tensors and bitsandbytes as the transformers 5 and vLLM 0.32 writers store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ingle.plugin import CheckpointInfo

Headers = Mapping[str, tuple[str, tuple[int, ...]]]

LINEAR = "model.layers.0.mlp.down_proj"
COMMON: Headers = {
    "model.embed_tokens.weight": ("BF16", (256, 64)),
    "model.layers.0.input_layernorm.weight": ("BF16", (64,)),
    "model.norm.weight": ("BF16", (64,)),
    "lm_head.weight": ("BF16", (256, 64)),
}
AWQ: Headers = {
    "qweight": ("I32", (128, 8)),
    "qzeros": ("I32", (1, 8)),
    "scales": ("F16", (1, 64)),
}
GPTQ: Headers = {
    "qweight": ("I32", (16, 64)),
    "qzeros": ("I32", (1, 8)),
    "scales": ("F16", (1, 64)),
    "g_idx": ("I32", (128,)),
}
EXL2: Headers = {
    "q_weight": ("I32", (16, 64)),
    "q_scale": ("I32", (4, 8)),
    "q_scale_max": ("F16", (4,)),
    "q_groups": ("I16", (8,)),
    "q_invperm": ("I32", (128,)),
}


def _checkpoint(
    tensors: Headers,
    quantization_config: Mapping[str, Any] | None = None,
    config_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> CheckpointInfo:
    headers = {**COMMON, **{f"{LINEAR}.{suffix}": value for suffix, value in tensors.items()}}
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    return CheckpointInfo(
        path=Path("/foreign"),
        hf_config=config,
        quantization_config=quantization_config,
        config_files=config_files or {},
        tensor_shapes={name: shape for name, (_, shape) in headers.items()},
        tensor_dtypes={name: dtype for name, (dtype, _) in headers.items()},
    )


def _unnamed(info: CheckpointInfo) -> CheckpointInfo:
    """The same files without a word about quantisation."""
    config = {k: v for k, v in info.hf_config.items() if k != "quantization_config"}
    return replace(info, hf_config=config, quantization_config=None, config_files={})


RARE_CHECKPOINTS: Final[Mapping[str, CheckpointInfo]] = {
    "hqq": _checkpoint(
        {
            "W_q": ("U8", (32, 128)),
            "scale": ("BF16", (128, 1)),
            "zero": ("BF16", (128, 1)),
            "shape": ("I64", (2,)),
        },
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}},
    ),
    "aqlm": _checkpoint(
        {
            "codes": ("I16", (64, 16, 1)),
            "codebooks": ("F16", (1, 65536, 1, 8)),
            "scales": ("F16", (64, 1, 1, 1)),
        },
        {"quant_method": "aqlm", "in_group_size": 8, "nbits_per_codebook": 16},
    ),
    "nvfp4": _checkpoint(
        {
            "weight": ("U8", (64, 64)),
            "weight_scale": ("F8_E4M3", (64, 8)),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "mxfp4": _checkpoint(
        {
            "experts.gate_up_proj_blocks": ("U8", (4, 128, 4, 16)),
            "experts.gate_up_proj_scales": ("U8", (4, 128, 4)),
        },
        {"quant_method": "mxfp4"},
    ),
    "vptq": _checkpoint(
        {
            "indices": ("I32", (1, 8, 64)),
            "centroids.weight": ("BF16", (1, 2048)),
            "weight_scale": ("BF16", (128,)),
            "weight_bias": ("BF16", (128,)),
        },
        {"quant_method": "vptq", "config_for_layers": {}},
    ),
    "quip": _checkpoint(
        {
            "Qidxs": ("I64", (64, 16)),
            "SU": ("F16", (128,)),
            "SV": ("F16", (64,)),
            "Wscale": ("F32", ()),
            "codebook_id": ("I64", ()),
        },
        {"quant_method": "quip", "codebook": "E8P12"},
    ),
    "spqr": _checkpoint(
        {
            "dense_weights": ("I64", (64, 8)),
            "row_offsets": ("I32", (65,)),
            "col_vals": ("I32", (40,)),
        },
        {"quant_method": "spqr", "bits": 3, "beta1": 16, "beta2": 16},
    ),
    "torchao": _checkpoint(
        {"weight_qdata": ("I8", (64, 128)), "weight_scale": ("BF16", (64, 1))},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
    ),
}
"""Kinds that people meet more rarely, as their tools write them; each also without its config."""

FOREIGN_CHECKPOINTS: Final[Mapping[str, CheckpointInfo]] = {
    "dense": _checkpoint({"weight": ("BF16", (64, 128))}),
    "awq": _checkpoint(
        AWQ,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "awq sidecar": _checkpoint(
        AWQ,
        config_files={
            "quant_config.json": {
                "zero_point": True,
                "q_group_size": 128,
                "w_bit": 4,
                "version": "GEMM",
            }
        },
    ),
    "gptq": _checkpoint(
        GPTQ,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    ),
    "gptq sidecar": _checkpoint(
        GPTQ,
        config_files={
            "quantize_config.json": {
                "bits": 4,
                "group_size": 128,
                "desc_act": False,
                "sym": True,
                "damp_percent": 0.01,
            }
        },
    ),
    "exl2": _checkpoint(EXL2, {"quant_method": "exl2", "version": "0.3.2", "bits": 4.0}),
    "exl2 unnamed": _checkpoint(EXL2),
    "exl3": _checkpoint(
        {
            "trellis": ("I16", (8, 4, 64)),
            "suh": ("F16", (128,)),
            "svh": ("F16", (64,)),
        },
        {"quant_method": "exl3", "version": "0.0.6", "bits": 4.0},
    ),
    "fp8": _checkpoint(
        {"weight": ("F8_E4M3", (64, 128)), "weight_scale_inv": ("F32", (1, 1))},
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    ),
    "compressed-tensors": _checkpoint(
        {
            "weight_packed": ("I32", (64, 16)),
            "weight_scale": ("BF16", (64, 1)),
            "weight_shape": ("I64", (2,)),
        },
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 128},
                }
            },
        },
    ),
    "bitsandbytes": _checkpoint(
        {
            "weight": ("U8", (4096, 1)),
            "weight.absmax": ("U8", (128,)),
            "weight.quant_map": ("F32", (16,)),
            "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "float-quantized": _checkpoint(
        {"weight": ("F8_E4M3", (64, 128)), "weight_scale": ("BF16", (64, 1))},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    ),
    "int-quantized": _checkpoint(
        {"weight": ("I8", (64, 128)), "weight_scale": ("BF16", (64, 1))},
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}},
    ),
    **RARE_CHECKPOINTS,
    **{f"{kind} unnamed": _unnamed(info) for kind, info in RARE_CHECKPOINTS.items()},
}
"""By kind. A class of the kit names the kinds its format reads in ``reads``."""
