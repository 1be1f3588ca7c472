"""AWQ, GPTQ and core's affine kernels held to what every format and kernel is held to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from ingle.plugin import LinearSpec, LinearWeight, WeightFormat
from ingle.testing import (
    MatmulKernelConformance,
    WeightFormatConformance,
    WeightSample,
    memory_checkpoint,
)
from ingle_quant_awq.format import AwqFormat
from ingle_quant_gptq.format import GptqFormat

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "awq_gptq"
CASES = [c for c in json.loads((VECTORS / "index.json").read_text())["cases"] if c["enforce"]]
ACTIVATION_SCALES = ".mlp.act.scales"


@cache
def vector(file: str) -> Mapping[str, torch.Tensor]:
    return load_file(VECTORS / file)


def sample(case: Mapping[str, Any]) -> WeightSample:
    tensors = vector(case["file"])
    stored = {name: t for name, t in tensors.items() if not name.startswith("__test__.")}
    expected = {
        module["prefix"]: tensors[module["weight_key"]]
        for module in case["modules"]
        if module.get("quantized", True)
    }
    for name in stored:
        if name.endswith(ACTIVATION_SCALES):
            (linear,) = expected
            expected[linear] = expected[linear] / stored[name].float()
    checkpoint = memory_checkpoint(
        stored, quantization_config=case["config"] or None, config_files=case["extra_files"]
    )
    return WeightSample(checkpoint=checkpoint, expected=expected, label=case["name"])


def samples(cases: Iterable[Mapping[str, Any]]) -> list[WeightSample]:
    return [sample(case) for case in cases]


class TestAwqFormat(WeightFormatConformance):
    plugin_module: ClassVar[str] = "ingle_quant_awq.plugin"
    format_name: ClassVar[str] = "awq"
    reads: ClassVar[frozenset[str]] = frozenset({"awq", "awq sidecar"})

    def samples(self) -> Sequence[WeightSample]:
        return samples(case for case in CASES if "awq" in case["format"])


class TestGptqFormat(WeightFormatConformance):
    plugin_module: ClassVar[str] = "ingle_quant_gptq.plugin"
    format_name: ClassVar[str] = "gptq"
    reads: ClassVar[frozenset[str]] = frozenset({"gptq", "gptq sidecar"})

    def samples(self) -> Sequence[WeightSample]:
        return samples(case for case in CASES if "awq" not in case["format"])


KERNEL_CASES = (
    "gptq_v1_b4_g128_sym_gar",
    "gptq_v1_b4_g32_sym_descact",
    "gptq_v1_b4_g128_sym_partial_last_group",
    "gptq_v1_b4_g32_sym_odd_shapes",
    "gptq_v2_b4_g64_asym",
    "gptq_v1_b8_g128_sym",
    "gptq_v2_b3_g32_asym_descact",
    "awq_gemm_g128_bias",
    "awq_gemv_fast_g128",
    "awq_scaled_activation_gelu",
)


class TestAffineCpuKernels(MatmulKernelConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.affine_cpu"
    kernel_names: ClassVar[frozenset[str]] = frozenset(
        {"affine_cpu_int4", "affine_cpu_planar", "affine_cpu"}
    )
    max_relative_error: ClassVar[Mapping[str, float]] = WeightFormat.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        chosen = [case for case in CASES if case["name"] in KERNEL_CASES]
        assert len(chosen) == len(KERNEL_CASES)
        return [self._weight(case, dtype) for case in chosen]

    def _weight(self, case: Mapping[str, Any], dtype: torch.dtype) -> LinearWeight:
        read = sample(case)
        weight_format = AwqFormat() if "awq" in case["format"] else GptqFormat()
        name, matrix = next(iter(read.expected.items()))
        spec = LinearSpec(
            name=name,
            in_features=matrix.shape[1],
            out_features=matrix.shape[0],
            dtype=dtype,
            device=self.device,
        )
        loader = weight_format.open(read.checkpoint.info)
        return loader.load_linear(spec, read.checkpoint.reader)
