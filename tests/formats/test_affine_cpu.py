"""Core's CPU kernels for affine weights against ``x @ dequantize().T``."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every
from typing import Any

import pytest
import torch

from ingle.builtin import nibble_words
from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.builtin.planar_cpu import PlanarWeight, int4_product_is_usable, pack_planar
from ingle.plugin import AffineWeight, DeviceInfo, KernelUse, MatmulKernel
from ingle.plugin.affine_packing import pack_bits

CPU = DeviceInfo(type="cpu")
ALL_ROWS = range(1, 1 << 30)
ROWS = (0, 1, 2, 7, 16, 17, 48, 49, 64, 257)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAP_FACTOR = 2.0
"""A kernel may be twice as far off as torch's own product in the same dtype."""

# bits, N, K, group size, kind of zeros
SHAPES = {
    "4 bits, zeros": (4, 192, 256, 128, "integer"),
    "4 bits, symmetric": (4, 128, 512, 64, "middle"),
    "4 bits, float offsets": (4, 64, 256, 32, "float"),
    "4 bits, one group": (4, 64, 256, 256, "integer"),
    "4 bits, short last group": (4, 64, 192, 128, "integer"),
    "4 bits, outputs not in blocks": (4, 100, 256, 64, "integer"),
    "4 bits, groups of 16": (4, 64, 128, 16, "integer"),
    "4 bits, odd shape": (4, 36, 100, 32, "middle"),
    "2 bits": (2, 64, 256, 64, "integer"),
    "3 bits": (3, 64, 256, 64, "integer"),
    "8 bits": (8, 64, 256, 128, "integer"),
    "8 bits, symmetric": (8, 64, 192, 64, "middle"),
    "8 bits, float offsets": (8, 36, 192, 32, "float"),
    "8 bits, one long group": (8, 36, 544, 544, "integer"),
}


def make(bits: int, n: int, k: int, group_size: int, kind: str, **changes: Any) -> AffineWeight:
    generator = torch.Generator().manual_seed(n + k + bits)
    groups = -(-k // group_size)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(groups, n, generator=generator) * 0.02 + 0.001).to(torch.float16)
    zeros = torch.randint(0, 1 << bits, (groups, n), dtype=torch.uint8, generator=generator)
    extra: dict[str, Any] = {"zeros": zeros} if kind == "integer" else {}
    if kind == "float":
        extra = {"offsets": -(scales * zeros)}
    return AffineWeight(
        bits=bits,
        group_size=group_size,
        in_features=k,
        out_features=n,
        codes=pack_bits(codes, bits),
        scales=scales,
        **{**extra, **changes},
    )


def kernels() -> list[MatmulKernel]:
    return sorted(ingle_matmul_kernels(CPU), key=lambda kernel: -kernel.priority)


def best(weight: AffineWeight, dtype: torch.dtype) -> MatmulKernel:
    use = KernelUse(device=CPU, dtype=dtype, rows=ALL_ROWS)
    return next(kernel for kernel in kernels() if kernel.supports(weight, use))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm(wanted)
    return float(torch.linalg.vector_norm(found.double() - wanted) / norm) if norm > 0 else 0.0


def torch_error(matrix: torch.Tensor, dtype: torch.dtype) -> float:
    x = torch.randn(64, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    found = torch.nn.functional.linear(x, matrix.to(dtype))
    return error(found, x.double() @ matrix.double().T)


@pytest.mark.parametrize(("shape", "dtype"), list(every(SHAPES, DTYPES)))
def test_the_product_is_as_exact_as_torchs_own_at_every_row_count(
    shape: str, dtype: torch.dtype
) -> None:
    weight = make(*SHAPES[shape])
    matrix = weight.dequantize()
    bound = CAP_FACTOR * torch_error(matrix, dtype)
    kernel = best(weight, dtype)
    prepared = kernel.prepare(weight)
    for rows in ROWS:
        x = torch.randn(rows, weight.in_features, generator=torch.Generator().manual_seed(rows))
        x = x.to(dtype)
        before = x.clone()
        y = kernel.matmul(x, prepared)
        assert y.shape == (rows, weight.stored_out_features)
        assert y.dtype == dtype
        assert torch.equal(x, before)
        assert error(y, x.double() @ matrix.double().T) <= bound, f"{rows} rows, {kernel.name}"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prepared_weight_dequantises_to_the_same_bits(shape: str) -> None:
    use = KernelUse(device=CPU, dtype=torch.bfloat16, rows=ALL_ROWS)
    weight = make(*SHAPES[shape])
    for kernel in kernels():
        if kernel.supports(weight, use):
            prepared = kernel.prepare(weight)
            assert torch.equal(prepared.dequantize(), weight.dequantize())
            moved = prepared.with_tensors(dict(prepared.tensors()))
            assert torch.equal(moved.dequantize(), weight.dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_order_and_input_scale_are_left_to_the_caller(dtype: torch.dtype) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    scale = torch.rand(256) + 0.5
    weight = make(*SHAPES["4 bits, zeros"], input_order=order, input_scale=scale)
    kernel = best(weight, dtype)
    prepared = kernel.prepare(weight)
    assert torch.equal(prepared.dequantize(), weight.dequantize())
    x = torch.randn(5, 256)
    y = kernel.matmul((x * scale)[:, order].to(dtype), prepared)
    assert error(y, x.double() @ weight.dequantize().double().T) < 1e-2


def test_groups_of_unequal_length_are_multiplied_too() -> None:
    offsets = torch.tensor([0, 10, 100, 256])
    scales = torch.rand(3, 64)
    equal = make(4, 64, 256, 256, "middle")
    weight = replace(equal, group_size=156, scales=scales, group_offsets=offsets)
    kernel = best(weight, torch.bfloat16)
    assert kernel.name == "affine_cpu_planar"
    x = torch.randn(3, 256)
    y = kernel.matmul(x, kernel.prepare(weight))
    torch.testing.assert_close(y, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "dtype"), list(every(("4 bits, zeros", "3 bits"), DTYPES)))
def test_strided_input_given_output_and_repetition_change_nothing(
    name: str, dtype: torch.dtype
) -> None:
    weight = make(*SHAPES[name])
    kernel = best(weight, dtype)
    prepared = kernel.prepare(weight)
    for rows in (1, 3, 64):
        wide = torch.randn(rows, 2 * weight.in_features).to(dtype)
        strided = wide[:, ::2]
        wanted = kernel.matmul(strided.contiguous(), prepared)
        out = torch.empty_like(wanted)
        assert kernel.matmul(strided, prepared, out=out) is out
        assert torch.equal(out, wanted)
        assert torch.equal(kernel.matmul(strided, prepared), wanted)


@pytest.mark.skipif(not int4_product_is_usable(), reason="torch packs int4 another way here")
@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [
        ("4 bits, zeros", torch.bfloat16, "affine_cpu_int4"),
        ("4 bits, one group", torch.bfloat16, "affine_cpu_int4"),
        ("4 bits, short last group", torch.bfloat16, "affine_cpu_int4"),
        ("4 bits, outputs not in blocks", torch.bfloat16, "affine_cpu_int4"),
        ("4 bits, groups of 16", torch.bfloat16, "affine_cpu_planar"),
        ("4 bits, zeros", torch.float32, "affine_cpu_planar"),
        ("4 bits, zeros", torch.float16, "affine_cpu_planar"),
        ("3 bits", torch.bfloat16, "affine_cpu"),
    ],
)
def test_the_fastest_kernel_that_fits_is_taken(shape: str, dtype: torch.dtype, name: str) -> None:
    assert best(make(*SHAPES[shape]), dtype).name == name


def test_the_layout_prepared_for_few_rows_serves_many() -> None:
    weight = make(*SHAPES["4 bits, zeros"])
    kernel = best(weight, torch.bfloat16)
    prepared = kernel.prepare(weight)
    use = KernelUse(device=CPU, dtype=torch.bfloat16, rows=range(65, 1 << 30))
    assert isinstance(prepared, PlanarWeight)
    assert kernel.supports(prepared, use)
    assert kernel.prepare(prepared) is prepared


def test_every_refusal_says_why() -> None:
    use = KernelUse(device=DeviceInfo(type="cuda"), dtype=torch.bfloat16, rows=ALL_ROWS)
    for kernel in kernels():
        assert "only on a CPU" in kernel.supports(make(*SHAPES["8 bits"]), use).reason
    assert ingle_matmul_kernels(DeviceInfo(type="cuda")) == []


def test_a_row_gives_the_same_bits_alone_and_among_others() -> None:
    weight = make(*SHAPES["4 bits, zeros"])
    kernel = best(weight, torch.float32)
    prepared = kernel.prepare(weight)
    x = torch.randn(8, weight.in_features)
    together = kernel.matmul(x, prepared)
    assert all(torch.equal(kernel.matmul(x[i : i + 1], prepared)[0], together[i]) for i in range(8))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_compiled_steps_product_is_the_weights_own(shape: str) -> None:
    """Where a prepared weight offers one: with the checkpoint's scales, summed in float32."""
    weight = make(*SHAPES[shape])
    prepared = best(weight, torch.bfloat16).prepare(weight)
    product = prepared.row_product()
    if product is None:
        assert shape not in ("4 bits, zeros", "4 bits, symmetric", "4 bits, float offsets")
        assert not shape.startswith("8 bits")
        return
    assert [(tuple(t.shape), t.dtype) for t in product.tensors()] == list(product.shapes)
    x = torch.randn(weight.in_features, generator=torch.Generator().manual_seed(1))
    found = product.function(product.tensors(), x)
    wanted = weight.dequantize().double() @ x.double()
    assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize(("inputs", "groups"), [(256, 1), (288, 9), (64, 2), (768, 3)])
def test_words_hold_eight_codes_of_an_output_in_the_bytes_of_their_block(
    block: int, inputs: int, groups: int
) -> None:
    """With the blocks of AVX-512 and of AVX2, whatever processor this is."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (192, inputs), generator=generator, dtype=torch.uint8)
    planar = pack_planar(codes, block)
    rewritten = planar.clone()
    nibble_words.rewrite(rewritten)
    words = nibble_words.as_words(rewritten, groups).flatten(1, 2)  # [NB, K/8, L]
    for place in range(8):
        nibbles = (words >> 4 * place) & 15
        found = nibbles.transpose(1, 2).reshape(192, -1)
        assert torch.equal(found.to(torch.uint8), codes[:, place::8])
    assert torch.equal(nibble_words.words_to_planar(rewritten), planar)


@pytest.mark.parametrize("kind", ["zeros", "symmetric", "offsets"])
@pytest.mark.parametrize(("inputs", "groups"), [(256, 1), (288, 9), (64, 2), (768, 3)])
def test_a_weight_serves_from_words_as_before(kind: str, inputs: int, groups: int) -> None:
    weight = words_case(kind, inputs, groups)
    kernel = best(weight, torch.bfloat16)
    prepared = kernel.prepare(weight)
    assert isinstance(prepared, PlanarWeight)
    wanted = weight.dequantize().float()
    product = prepared.row_product()
    assert product is not None
    assert product.adopt is not None
    copies = [tensor.clone() for tensor in product.tensors()]
    assert torch.equal(prepared.dequantize().float(), wanted)
    for copy, own in zip(copies, product.adopt(), strict=True):
        assert torch.equal(copy, own)
    assert torch.equal(prepared.dequantize().float(), wanted)
    moved = prepared.with_tensors({n: t.clone() for n, t in prepared.tensors().items()})
    assert torch.equal(moved.dequantize().float(), wanted)
    for rows in (0, 1, 3, 4, 5, 32, 33):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
        found = kernel.matmul(x, prepared)
        assert error(found.double(), x.double() @ wanted.double().T) < 5e-3, rows
    single = torch.randn(3, inputs, generator=torch.Generator().manual_seed(2))
    found = kernel.matmul(single, prepared)
    assert error(found.double(), single.double() @ wanted.double().T) < 1e-5


def words_case(kind: str, inputs: int, groups: int) -> AffineWeight:
    """4 bits, 128 outputs, groups alike."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (128, inputs), generator=generator, dtype=torch.uint8)
    tables: dict[str, torch.Tensor] = {}
    if kind == "zeros":
        tables["zeros"] = torch.randint(16, (groups, 128), generator=generator, dtype=torch.uint8)
    if kind == "offsets":
        tables["offsets"] = torch.randn(groups, 128, generator=generator).half()
    return AffineWeight(
        bits=4,
        group_size=inputs // groups,
        in_features=inputs,
        out_features=128,
        codes=pack_bits(codes, 4),
        scales=torch.rand(groups, 128, generator=generator).half(),
        **tables,
    )


@pytest.mark.parametrize(("inputs", "groups"), [(72, 9), (64, 4)])
def test_groups_that_torchs_int4_product_does_not_take_have_no_words(
    inputs: int, groups: int
) -> None:
    weight = words_case("zeros", inputs, groups)
    prepared = best(weight, torch.bfloat16).prepare(weight)
    assert prepared.row_product() is None
