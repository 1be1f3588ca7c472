"""Mixtures of experts in every way files store them: outputs equal transformers' block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ingle import CheckpointError
from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseTorchKernel
from ingle.checkpoint.model_config import load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.model.experts import ExpertMLP
from ingle.model.feed_forward_build import build_experts
from ingle.model.linear import ROW_RANGES, PreparedWeight
from ingle.model.weights import WeightSource
from ingle.plugin import DeviceInfo, KernelUse, LinearWeight, WeightFormat
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

CPU = DeviceInfo(type="cpu")
PREFIX = "model.layers.0"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
Tensors = dict[str, torch.Tensor]


def reference(family: str) -> torch.nn.Module:
    """transformers' random model of one layer; its experts are stacked."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    return model


def stacked(model: torch.nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def apart(tensors: Mapping[str, torch.Tensor], names: tuple[str, str, str], block: str) -> Tensors:
    """Every expert's gate, up and down projections as tensors of their own."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for number, matrix in enumerate(tensor):
                for part, half in zip(names, matrix.chunk(2), strict=False):
                    found[f"{PREFIX}.{block}.experts.{number}.{part}.weight"] = half.clone()
        elif name.endswith("experts.down_proj"):
            for number, matrix in enumerate(tensor):
                found[f"{PREFIX}.{block}.experts.{number}.{names[2]}.weight"] = matrix.clone()
        else:
            found[name.replace(".mlp.", f".{block}.")] = tensor
    return found


QWEN = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


def write(folder: Path, model: Any, tensors: Tensors, method: str | None = None) -> Path:
    config = {**model.config.to_dict(), "torch_dtype": "float32"}
    if method is not None:
        config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
    return folder


FILE = "model.safetensors"


def prepare(weight: LinearWeight) -> PreparedWeight:
    use = KernelUse(device=CPU, dtype=torch.float32, rows=range(1, 1 << 30))
    kernels = [*ingle_matmul_kernels(CPU), DenseTorchKernel()]
    kernel = next(one for one in kernels if one.supports(weight, use))
    return PreparedWeight(weight=kernel.prepare(weight), kernels=(kernel,) * len(ROW_RANGES))


def load(folder: Path, *formats: WeightFormat) -> ExpertMLP:
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.info()
        loaders = [form.open(info) for form in (*formats, DenseFormat())]
        source = WeightSource(checkpoint, loaders, prepare, torch.float32, CPU)
        return build_experts(load_model_config(folder, info), source, PREFIX)


@torch.inference_mode()
def check(model: Any, block: ExpertMLP) -> None:
    """Whole, token by token, and with a residual."""
    x = torch.randn(40, 128)
    wanted = model.model.layers[0].mlp(x.unsqueeze(0))[0]
    residual = torch.randn_like(x)
    torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-4)
    one_by_one = torch.cat([block(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(one_by_one, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(block(x, residual), wanted + residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["stacked", "apart"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_dense_experts_equal_transformers(tmp_path: Path, family: str, layout: str) -> None:
    model = reference(family)
    tensors = stacked(model)
    assert tensors[f"{PREFIX}.mlp.experts.gate_up_proj"].shape == (5, 128, 128)
    if layout == "apart":
        old = family == "Mixtral"
        names, block = (MIXTRAL, "block_sparse_moe") if old else (QWEN, "mlp")
        tensors = apart(tensors, names, block)
    check(model, load(write(tmp_path, model, tensors)))


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_experts_quantised_apart_equal_transformers(
    tmp_path: Path, round_to_nearest: Any, family: str, method: str
) -> None:
    model = reference(family)
    exact = stacked(model)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parts = [rounded(round_to_nearest, method, matrix) for matrix in parameter.detach()]
            parameter.data.copy_(torch.stack(parts))
    names, block = (MIXTRAL, "block_sparse_moe") if family == "Mixtral" else (QWEN, "mlp")
    tensors = {}
    for name, tensor in apart(exact, names, block).items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        for role, packed in pack(round_to_nearest, method, tensor).items():
            tensors[f"{name.removesuffix('weight')}{role}"] = packed
    form = AwqFormat() if method == "awq" else GptqFormat()
    check(model, load(write(tmp_path, model, tensors, method), form))


def pack(packer: Any, method: str, weight: torch.Tensor) -> Tensors:
    if method == "awq":
        return packer.pack_awq_gemm(weight, 32)
    return packer.pack_gptq(weight, 4, 32, False, None)


def rounded(packer: Any, method: str, weight: torch.Tensor) -> torch.Tensor:
    """What the packed weight stands for; rows are rounded apart, so parts may be joined."""
    options = (4, 32, False) if method == "awq" else (4, 32, False, None)
    return packer.rounded(weight, *options)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = reference("Qwen3Moe")
    tensors = apart(stacked(model), QWEN, "mlp")
    del tensors[f"{PREFIX}.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj"):
        load(write(tmp_path, model, tensors))


def test_a_stack_of_too_few_experts_is_named(tmp_path: Path) -> None:
    model = reference("Qwen3Moe")
    tensors = stacked(model)
    for role in ("gate_up_proj", "down_proj"):
        name = f"{PREFIX}.mlp.experts.{role}"
        tensors[name] = tensors[name][:4].clone()
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj.*more than 4.*\[4, 128, 128"):
        load(write(tmp_path, model, tensors))


def test_a_layer_without_its_router_is_named(tmp_path: Path) -> None:
    model = reference("Mixtral")
    tensors = stacked(model)
    del tensors[f"{PREFIX}.mlp.gate.weight"]
    with pytest.raises(CheckpointError, match=r"neither model\.layers\.0\.mlp\.gate nor"):
        load(write(tmp_path, model, tensors))


def test_stacked_experts_are_listed_with_their_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path, reference("Mixtral"), stacked(reference("Mixtral")))
    with open_checkpoint(folder) as checkpoint:
        loader = DenseFormat().open(checkpoint.info())
    name = f"{PREFIX}.mlp.experts.down_proj"
    assert loader.linears()[name] == (128, 64)
    assert loader.tensor_names(name) == (name,)
    assert loader.packed_bytes(name) == 5 * 128 * 64 * 4
