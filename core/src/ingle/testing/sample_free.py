"""Classes of the kit for a plugin whose author is not here to supply samples.

Shape letters: N output features, K input features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ingle.plugin import AffineWeight, LinearWeight, WeightFormat
from ingle.plugin.affine_packing import pack_bits
from ingle.testing.matmul_kernel import MatmulKernelConformance
from ingle.testing.weight_format import WeightFormatConformance, WeightSample


class FormatWithoutSamples(WeightFormatConformance):
    """Detection, bounds and the module itself; tests that go over samples have none."""

    def samples(self) -> Sequence[WeightSample]:
        """None."""
        return []


class AffineKernels(MatmulKernelConformance):
    """Kernels for affine weights, on random ones; kernels for a plugin's own weights decline."""

    kernel_names: ClassVar[frozenset[str]] = frozenset()
    max_relative_error: ClassVar[Mapping[str, float]] = WeightFormat.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        """2, 4 and 8 bits; symmetric, with zeros, and in act-order."""
        return [_affine(bits, order) for bits in (2, 4, 8) for order in (False, True)]


def _affine(bits: int, order: bool) -> AffineWeight:
    n, k, group = 96, 256, 64
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 1 << bits, (k // group, n), dtype=torch.uint8, generator=generator)
    scales = torch.rand(k // group, n, generator=generator) * 0.01 + 0.001
    return AffineWeight(
        bits=bits,
        group_size=group,
        in_features=k,
        out_features=n,
        codes=pack_bits(codes, bits),
        scales=scales.half(),
        zeros=zeros if order else None,
        input_order=torch.randperm(k, generator=generator) if order else None,
    )
