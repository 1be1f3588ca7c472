"""EXL2 held to what every format is held to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file

from ingle.plugin import LinearSpec, LinearWeight
from ingle.testing import (
    MatmulKernelConformance,
    WeightFormatConformance,
    WeightSample,
    memory_checkpoint,
)
from ingle_quant_exl2.format import Exl2Format

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "exl2"
CASES = [
    case
    for case in json.loads((VECTORS / "index.json").read_text())["vectors"]
    if case["kind"] in ("exl2_linear", "converter")
]


def read_samples() -> list[WeightSample]:
    samples = []
    for case in CASES:
        tensors = load_file(VECTORS / case["file"])
        stored = {name: tensor for name, tensor in tensors.items() if name.startswith("layer.")}
        logical = case.get("logical_out_features", case["out_features"])
        samples.append(
            WeightSample(
                checkpoint=memory_checkpoint(stored),
                expected={"layer": tensors["expected.W"].float()[:logical]},
                label=case["file"],
            )
        )
    return samples


class TestExl2Format(WeightFormatConformance):
    plugin_module: ClassVar[str] = "ingle_quant_exl2.plugin"
    format_name: ClassVar[str] = "exl2"
    reads: ClassVar[frozenset[str]] = frozenset({"exl2", "exl2 unnamed"})
    golden_error: ClassVar[float] = 0.0

    def samples(self) -> Sequence[WeightSample]:
        return read_samples()


class TestExl2CpuKernel(MatmulKernelConformance):
    plugin_module: ClassVar[str] = "ingle_quant_exl2.plugin"
    kernel_names: ClassVar[frozenset[str]] = frozenset({"exl2_cpu"})
    max_relative_error: ClassVar[Mapping[str, float]] = Exl2Format.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        weights = []
        for sample in read_samples():
            loader = Exl2Format().open(sample.checkpoint.info)
            for name, matrix in sample.expected.items():
                spec = LinearSpec(
                    name=name,
                    in_features=matrix.shape[1],
                    out_features=matrix.shape[0],
                    dtype=dtype,
                    device=self.device,
                )
                weights.append(loader.load_linear(spec, sample.checkpoint.reader))
        return weights
