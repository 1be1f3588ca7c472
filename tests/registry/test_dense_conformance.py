"""The conformance kit, applied to dense weights, core's own plugin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingle.builtin.dense import DenseFormat
from ingle.builtin.dense_linear import DenseWeight, mkldnn_support
from ingle.plugin import LinearWeight
from ingle.testing import (
    MatmulKernelConformance,
    WeightFormatConformance,
    WeightSample,
    memory_checkpoint,
)


def matrix(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A fixed weight [N, K]."""
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).to(dtype)


def sample(dtype: torch.dtype) -> WeightSample:
    """Two projections that fuse, a head, and what is not a linear."""
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
    weights = {q: matrix(64, 48, dtype), v: matrix(16, 48, dtype), "lm_head": matrix(99, 48, dtype)}
    tensors = {f"{name}.weight": weight for name, weight in weights.items()}
    tensors["model.embed_tokens.weight"] = matrix(99, 48, dtype)
    tensors["model.norm.weight"] = torch.ones(48, dtype=dtype)
    tensors[f"{q}.bias"] = torch.ones(64, dtype=dtype)
    return WeightSample(
        checkpoint=memory_checkpoint(tensors),
        expected={name: weight.float() for name, weight in weights.items()},
        fuse=(q, v),
        label=str(dtype),
    )


class TestDenseFormat(WeightFormatConformance):
    plugin_module = "ingle.builtin.dense"
    format_name = "dense"
    reads = frozenset({"dense"})
    golden_error = 0.0

    def samples(self) -> Sequence[WeightSample]:
        return [sample(torch.float32), sample(torch.bfloat16), sample(torch.float16)]


class TestDenseKernels(MatmulKernelConformance):
    plugin_module = "ingle.builtin.dense"
    kernel_names = frozenset({"dense_torch", "dequantize"}) | (
        {"dense_mkldnn"} if mkldnn_support() else frozenset()
    )
    max_relative_error = DenseFormat.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        return [DenseWeight(matrix(n, k, dtype)) for n, k in ((64, 48), (100, 70), (7, 129))]
