"""Several rows times 4-bit words and 8-bit bytes, as they run once their functions are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ingle.builtin import byte_products, nibble_words, word_products
from ingle.builtin.affine_cpu_kernels import ByteKernel, ByteTileKernel, Int4Kernel
from ingle.builtin.byte_products import ByteProducts
from ingle.builtin.planar_cpu import PlanarWeight
from ingle.builtin.word_products import WordProducts
from ingle.engine.background_compiler import BackgroundCompiler
from ingle.engine.function_compiler import FunctionCompiler
from ingle.model.function_package import load_function
from ingle.plugin import AffineWeight, DeviceInfo, KernelUse, MatmulKernel
from ingle.plugin.affine_packing import pack_bits
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.nibble_tiles import block_size

ROWS = (1, 2, 4, 5, 16, 32, 33, 70)
KINDS = ("zeros", "symmetric", "offsets")


def case(bits: int, kind: str, outputs: int, inputs: int, groups: int) -> AffineWeight:
    draw = torch.Generator().manual_seed(outputs + inputs)
    highest = 1 << bits
    codes = torch.randint(highest, (outputs, inputs), generator=draw, dtype=torch.uint8)
    tables: dict[str, torch.Tensor] = {}
    if kind == "zeros":
        zeros = torch.randint(highest, (groups, outputs), generator=draw)
        tables["zeros"] = zeros.to(torch.uint8)
    if kind == "offsets":
        tables["offsets"] = torch.randn(groups, outputs, generator=draw).half()
    return AffineWeight(
        bits=bits,
        group_size=inputs // groups,
        in_features=inputs,
        out_features=outputs,
        codes=pack_bits(codes, bits),
        scales=(torch.rand(groups, outputs, generator=draw) * 0.02 + 0.001).half(),
        **tables,
    )


def as_if_compiled(kernel: MatmulKernel, weight: AffineWeight) -> list[str]:
    """Lets the kernel take its way for compiled functions, with the functions as written; gives
    their names as they are called."""
    called: list[str] = []
    for one in kernel.functions(weight):

        def run(tensors: list[torch.Tensor], one: CompiledFunction = one) -> None:
            assert all(tensor.is_contiguous() for tensor in tensors)
            called.append(one.source.name.rpartition(":")[2])
            one.source.function(*tensors)

        one.use(run)
    return called


def error_beside_torch(kernel: MatmulKernel, weight: AffineWeight, rows: int) -> float:
    """Relative error in units of torch's own with the dense matrix in bfloat16."""
    x = torch.randn(rows, weight.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = weight.dequantize()
    exact = x.double() @ dense.double().T

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    return error(kernel.matmul(x, weight)) / error(x @ dense.to(torch.bfloat16).T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "groups"), [(256, 8), (256, 1), (384, 3)])
def test_words_are_as_right_as_dense_products(kind: str, inputs: int, groups: int) -> None:
    kernel = Int4Kernel()
    weight = kernel.prepare(case(4, kind, 3 * block_size(), inputs, groups))
    assert isinstance(weight, PlanarWeight)
    called = as_if_compiled(kernel, weight)
    weight.use_words()
    for rows in ROWS:
        assert error_beside_torch(kernel, weight, rows) < 1.1, rows
    assert [name.partition("_")[0] for name in called] == ["ONE"] * 3 + ["ROWS"] * 3 + ["TILE"] * 2


def test_a_matrix_of_many_tiles_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Int4Kernel()
    weight = kernel.prepare(case(4, "zeros", 4 * block_size(), 256, 4))
    assert isinstance(weight, PlanarWeight)
    called = as_if_compiled(kernel, weight)
    weight.use_words()
    whole = error_beside_torch(kernel, weight, 40)
    monkeypatch.setattr("ingle.plugin.nibble_tiles.TILE_WEIGHTS", 1)
    monkeypatch.setattr("ingle.plugin.nibble_tiles.TILE_OUTPUTS", 3 * nibble_words.LANES)
    called.clear()
    assert error_beside_torch(kernel, weight, 40) == pytest.approx(whole, rel=0.05)
    assert len(called) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "groups"), [(256, 8), (256, 1), (384, 3)])
def test_bytes_are_as_right_as_dense_products(
    monkeypatch: pytest.MonkeyPatch, kind: str, inputs: int, groups: int
) -> None:
    monkeypatch.setattr(byte_products, "TILE_WEIGHTS", 100 * inputs)
    kernel = ByteTileKernel()
    weight = kernel.prepare(case(8, kind, 250, inputs, groups))
    assert isinstance(weight, AffineWeight)
    called = as_if_compiled(kernel, weight)
    for rows in ROWS:
        assert error_beside_torch(kernel, weight, rows) < 1.1, rows
    assert len(called) == 3 * len(ROWS)
    x = torch.randn(3, inputs).bfloat16()
    out = torch.empty(3, 250, dtype=torch.bfloat16)
    assert kernel.matmul(x, weight, out=out) is out
    assert torch.equal(out, kernel.matmul(x, weight))


def test_bytes_in_other_dtypes_ask_for_no_compiler() -> None:
    weight = case(8, "zeros", 64, 256, 2)
    cpu = DeviceInfo(type="cpu")
    for dtype in (torch.float16, torch.float32):
        use = KernelUse(device=cpu, dtype=dtype, rows=range(1, 2))
        assert not ByteTileKernel().supports(weight, use)
        assert ByteKernel().supports(weight, use)
    assert not ByteKernel().functions(ByteKernel().prepare(weight))


def test_a_name_that_no_function_has_is_no_attribute() -> None:
    for module in (word_products, byte_products):
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = module.nothing_like_it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_functions_give_what_the_written_ones_do(tmp_path: Path) -> None:
    words = WordProducts(32, torch.float16, torch.uint8).functions
    functions: Sequence[CompiledFunction] = (
        *words,
        ByteProducts(torch.bfloat16, None).decode,
    )
    job = FunctionCompiler(functions, tmp_path)
    BackgroundCompiler((job,)).compile_now()
    # Loading compares each with what the written function gives.
    assert all(one.is_compiled for one in functions)
    assert all(load_function(path, source) for path, source in job._wanted.values())
