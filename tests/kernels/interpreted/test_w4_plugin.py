"""The 4-bit CUDA kernel as a plugin, held to what every kernel is held to, in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch
from interpreted_device import CARD

from ingle.builtin.affine_cuda import ingle_matmul_kernels
from ingle.builtin.affine_cuda_weight import W4CudaWeight, decode_tiles
from ingle.plugin import AffineWeight, DeviceInfo, KernelUse, LinearWeight, WeightFormat
from ingle.plugin.affine_packing import pack_bits
from ingle.testing import MatmulKernelConformance


def affine(
    n: int, k: int, group_size: int, *, bits: int = 4, zeros: str = "stored", order: bool = False
) -> AffineWeight:
    """A random affine weight. ``zeros``: ``stored``, ``implied`` or ``offsets``."""
    generator = torch.Generator().manual_seed(n + k + group_size)
    groups = -(-k // group_size)
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator)
    scales = torch.rand(groups, n, generator=generator) * 0.01 + 0.005
    stored = torch.randint(0, 17, (groups, n), generator=generator).to(torch.uint8)
    return AffineWeight(
        bits=bits,
        group_size=group_size,
        in_features=k,
        out_features=n,
        codes=pack_bits(codes.to(torch.uint8), bits),
        scales=scales.half(),
        zeros=stored if zeros == "stored" else None,
        offsets=scales.half() if zeros == "offsets" else None,
        input_order=torch.randperm(k, generator=generator) if order else None,
        input_scale=torch.rand(k, generator=generator) + 0.5 if order else None,
    )


WEIGHTS = {
    "groups of 128, zeros": lambda: affine(80, 640, 128),
    "groups of 64, no zeros": lambda: affine(64, 192, 64, zeros="implied"),
    "act-order and input scale": lambda: affine(48, 256, 32, order=True),
    "split along the inputs": lambda: affine(32, 1024, 128),
    "one group": lambda: affine(16, 96, 96),
}


class TestW4CudaKernel(MatmulKernelConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.affine_cuda"
    device: ClassVar[DeviceInfo] = CARD
    kernel_names: ClassVar[frozenset[str]] = frozenset({"w4_triton"})
    max_relative_error: ClassVar[Mapping[str, float]] = WeightFormat.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        return [make() for make in WEIGHTS.values()]


def use(dtype: torch.dtype = torch.float16, device: DeviceInfo = CARD) -> KernelUse:
    return KernelUse(device=device, dtype=dtype, rows=range(1, 17))


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_packed_weight_dequantises_to_the_same_bits(name: str) -> None:
    (kernel,) = ingle_matmul_kernels(CARD)
    weight = WEIGHTS[name]()
    packed = kernel.prepare(weight)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert kernel.prepare(packed) is packed
    copy = packed.with_tensors({n: t.clone() for n, t in packed.tensors().items()})
    assert torch.equal(copy.dequantize(), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_decoded_tiles_are_the_weight_rounded_once(name: str, dtype: torch.dtype) -> None:
    (kernel,) = ingle_matmul_kernels(CARD)
    weight = WEIGHTS[name]()
    packed = kernel.prepare(weight)
    assert isinstance(packed, W4CudaWeight)
    rows = decode_tiles(packed.packed, 1, packed.packed.words.shape[0], dtype)
    wanted = weight.decode_rows(16, weight.stored_out_features).to(dtype)
    assert torch.equal(rows[: wanted.shape[0]], wanted)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (lambda: affine(64, 128, 128, bits=3), "3 bits"),
        (lambda: affine(64, 128, 128, zeros="offsets"), "float offsets"),
        (lambda: affine(64, 128, 16), "group size 16"),
        (lambda: affine(64, 80, 80), "multiple of 32"),
    ],
)
def test_what_it_cannot_serve_is_declined_with_the_reason(weight: object, why: str) -> None:
    (kernel,) = ingle_matmul_kernels(CARD)
    support = kernel.supports(weight(), use())  # type: ignore[operator]
    assert not support.ok
    assert why in support.reason


def test_an_old_card_and_float32_are_declined() -> None:
    (kernel,) = ingle_matmul_kernels(CARD)
    old = DeviceInfo(type="cuda", capability=(7, 5))
    assert "7, 5" in kernel.supports(affine(64, 128, 128), use(device=old)).reason
    assert "float32" in kernel.supports(affine(64, 128, 128), use(torch.float32)).reason
