"""Core's products for any weight with a Triton decoder, in the interpreter: every format, every
dtype, few rows, some, and many; pairwise here, the whole product in ``make test-kernels-full``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from interpreted_device import CARD

from ingle.builtin import tile_cuda_kernel
from ingle.builtin.tile_cuda import ingle_matmul_kernels
from ingle.plugin import AffineWeight, KernelUse, LinearWeight, WeightFormat
from ingle.plugin.affine_packing import pack_bits
from ingle.plugin.device import DeviceInfo
from ingle.testing import MatmulKernelConformance
from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes
from ingle_quant_exl2.weight import StoredExl2Weight

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "formats" / "stranger"))

ROWS = (1, 2, 7, 16, 17, 64, 257)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def affine(
    bits: int, n: int, k: int, group_size: int, kind: str = "zeros", *, uneven: bool = False
) -> AffineWeight:
    draw = torch.Generator().manual_seed(bits + n + k)
    offsets = torch.tensor([0, group_size // 2, *range(group_size, k, group_size), k])
    groups = len(offsets) - 1 if uneven else -(-k // group_size)
    codes = torch.randint(0, 1 << bits, (n, k), generator=draw).to(torch.uint8)
    scales = (torch.rand(groups, n, generator=draw) * 0.01 + 0.005).half()
    zeros = torch.randint(0, (1 << bits) + 1, (groups, n), generator=draw).clamp(max=255)
    return AffineWeight(
        bits=bits,
        group_size=group_size,
        in_features=k,
        out_features=n,
        codes=pack_bits(codes, bits),
        scales=scales,
        zeros=zeros.to(torch.uint8) if kind == "zeros" else None,
        offsets=(-scales * zeros).float() if kind == "offsets" else None,
        group_offsets=offsets if uneven else None,
        input_order=torch.randperm(k, generator=draw) if uneven else None,
    )


def exl2(*widths: tuple[int, int], n: int = 48) -> StoredExl2Weight:
    """Sections of (bits, rows) in groups of 32."""
    draw = torch.Generator().manual_seed(len(widths))
    groups: list[int] = []
    words, parts = 0, []
    for bits, rows in widths:
        parts.append(pack_codes(torch.randint(0, 1 << bits, (rows, n), generator=draw), bits))
        for _ in range(rows // 32):
            groups += [bits, words]
            words += bits
    k = sum(rows for _, rows in widths)
    return StoredExl2Weight(
        in_features=k,
        out_features=n,
        stored_out_features=n,
        dtype=torch.float32,
        layout=parse_layout("lin", groups, words, k),
        q_scale=pack_scale_codes(torch.randint(0, 16, (k // 32, n), generator=draw)),
        q_scale_max=(torch.rand(k // 32, generator=draw) * 0.1 + 0.05).half(),
        q_weight=torch.cat(parts),
    )


def nf4() -> LinearWeight:
    from ingle_quant_nf4_format import Nf4Weight

    draw = torch.Generator().manual_seed(4)
    return Nf4Weight(
        in_features=128,
        out_features=40,
        stored_out_features=40,
        codes=torch.randint(0, 256, (40, 64), generator=draw).to(torch.uint8),
        absmax=torch.rand(40, 2, generator=draw).half(),
    )


WEIGHTS: Mapping[str, Callable[[], LinearWeight]] = {
    "2 bits": lambda: affine(2, 33, 128, 32),
    "3 bits": lambda: affine(3, 40, 96, 32),
    "4 bits, split": lambda: affine(4, 32, 512, 128),
    "4 bits, odd sizes": lambda: affine(4, 37, 100, 32),
    "4 bits, float offsets": lambda: affine(4, 32, 64, 16, "offsets"),
    "4 bits, uneven groups": lambda: affine(4, 32, 128, 64, uneven=True),
    "5 bits": lambda: affine(5, 32, 96, 96, "middle"),
    "6 bits": lambda: affine(6, 32, 64, 32, "middle"),
    "7 bits": lambda: affine(7, 32, 64, 64),
    "8 bits": lambda: affine(8, 32, 128, 64),
    "mixed, 2 to 8": lambda: exl2((8, 32), (6, 32), (5, 32), (4, 64), (3, 32), (2, 32)),
    "mixed, 4 and 3, split": lambda: exl2((4, 512), (3, 32), n=32),
    "stranger": nf4,
}


class TestTileCudaKernel(MatmulKernelConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.tile_cuda"
    device: ClassVar[DeviceInfo] = CARD
    kernel_names: ClassVar[frozenset[str]] = frozenset({"tiles_triton"})
    max_relative_error: ClassVar[Mapping[str, float]] = WeightFormat.max_relative_error

    def weights(self, dtype: torch.dtype) -> Sequence[LinearWeight]:
        names = ("3 bits", "4 bits, split", "mixed, 4 and 3, split")
        return [WEIGHTS[name]() for name in names]


def error_and_torchs(weight: LinearWeight, dtype: torch.dtype, rows: int) -> tuple[float, float]:
    """Relative error of the kernel, and of torch with the dense weight, in ``dtype``."""
    (kernel,) = ingle_matmul_kernels(CARD)
    assert kernel.supports(weight, KernelUse(device=CARD, dtype=dtype, rows=range(rows, rows + 1)))
    ready = kernel.prepare(weight)
    order = weight.input_order
    x = torch.randn(rows, weight.in_features, generator=torch.Generator().manual_seed(rows))
    x = x.to(dtype)
    exact = x.double() @ weight.dequantize().double().T
    bare = x @ weight.dequantize().to(dtype).T
    scratch = torch.zeros(kernel.workspace_bytes(ready, rows), dtype=torch.uint8)
    given = x if order is None else x[:, order]
    found = kernel.matmul(given, ready, workspace=scratch)
    assert found.dtype is dtype
    assert not scratch[: 1 << 16].any()
    again = kernel.matmul(given, ready, workspace=scratch)
    assert torch.equal(found, again)

    def error(product: torch.Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    return error(found), error(bare)


def check(name: str, dtype: torch.dtype, rows: int) -> None:
    """Within twice torch's own error, and within the formats' bounds."""
    found, torchs = error_and_torchs(WEIGHTS[name](), dtype, rows)
    bound = WeightFormat.max_relative_error[str(dtype).removeprefix("torch.")]
    assert found <= min(bound, max(2 * torchs, 1e-6)), (name, dtype, rows, found, torchs)


PAIRWISE = [
    (name, dtype, ROWS[(2 * index + 3 * place) % len(ROWS)])
    for index, name in enumerate(WEIGHTS)
    for place, dtype in enumerate(DTYPES)
]
"""Every format with every dtype, and every row count with both."""


def test_the_pairwise_cover_covers_pairs() -> None:
    assert {(dtype, rows) for _, dtype, rows in PAIRWISE} == {(d, r) for d in DTYPES for r in ROWS}


@pytest.mark.parametrize(("name", "dtype", "rows"), PAIRWISE)
def test_products_of_every_format_and_dtype(name: str, dtype: torch.dtype, rows: int) -> None:
    check(name, dtype, rows)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_of_every_format_dtype_and_row_count(
    name: str, dtype: torch.dtype, rows: int
) -> None:
    check(name, dtype, rows)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_few_outputs_decoded_at_a_time_are_the_weight(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than are multiplied by tiles: decoded in parts of some outputs."""
    weight = WEIGHTS[name]()
    monkeypatch.setattr(tile_cuda_kernel, "DECODE_ELEMENTS", 13 * weight.in_features)
    check(name, torch.float32, 257)


def test_what_has_no_decoder_is_declined() -> None:
    (kernel,) = ingle_matmul_kernels(CARD)

    class Opaque(type(nf4())):  # type: ignore[misc]
        triton = None

    weight = nf4()
    weight.__class__ = Opaque
    use = KernelUse(device=CARD, dtype=torch.float16, rows=range(1, 17))
    assert "no Triton decoder" in kernel.supports(weight, use).reason
