"""Many rows times 4-bit weights by decoded tiles, as they run once the decoding is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingle.builtin.affine_cpu_kernels import Int4Kernel, PlanarKernel
from ingle.engine.background_compiler import BackgroundCompiler
from ingle.engine.function_compiler import FunctionCompiler
from ingle.model.function_package import example_arguments, function_path, load_function
from ingle.plugin import AffineWeight, LinearWeight, MatmulKernel, nibble_tiles
from ingle.plugin.affine_packing import pack_bits
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.nibble_tiles import DECODE_32, DECODE_64, block_size, decode_blocks
from ingle_quant_exl2.cpu import Exl2CpuKernel
from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes
from ingle_quant_exl2.weight import StoredExl2Weight

ROWS = (33, 64, 257)


def affine(
    n: int, k: int, group: int, dtype: torch.dtype = torch.float16, *, zeros: bool = True
) -> AffineWeight:
    draw = torch.Generator().manual_seed(n + k)
    groups = -(-k // group)
    integers = torch.randint(0, 17, (groups, n), dtype=torch.uint8, generator=draw)
    return AffineWeight(
        bits=4,
        group_size=group,
        in_features=k,
        out_features=n,
        codes=pack_bits(torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw), 4),
        scales=(torch.rand(groups, n, generator=draw) * 0.02 + 0.001).to(dtype),
        zeros=integers if zeros else None,
    )


def exl2(n: int, widths: list[tuple[int, int]]) -> StoredExl2Weight:
    """Sections of (bits, rows), in groups of 64."""
    draw = torch.Generator().manual_seed(n)
    groups, words, parts = [], 0, []
    for bits, rows in widths:
        codes = torch.randint(0, 1 << bits, (rows, n), generator=draw)
        parts.append(pack_codes(codes, bits))
        for _ in range(rows // 64):
            groups += [bits, words]
            words += 64 * bits // 32
    num_groups, k = len(groups) // 2, sum(rows for _, rows in widths)
    return StoredExl2Weight(
        in_features=k,
        out_features=n,
        stored_out_features=n,
        dtype=torch.bfloat16,
        layout=parse_layout("lin", groups, words, k),
        q_scale=pack_scale_codes(torch.randint(0, 16, (num_groups, n), generator=draw)),
        q_scale_max=(torch.rand(num_groups, generator=draw) * 0.1 + 0.05).half(),
        q_weight=torch.cat(parts),
    )


def as_if_compiled(kernel: MatmulKernel, weight: LinearWeight) -> bool:
    """Lets the kernel take its way for compiled functions, with the functions as written."""
    functions = kernel.functions(weight)
    for one in functions:
        one.use(lambda tensors: decode_blocks(*tensors))
    return bool(functions)


def error_beside_torch(kernel: MatmulKernel, weight: LinearWeight, rows: int) -> float:
    """Relative error in units of torch's own with the dense matrix in bfloat16."""
    ready = kernel.prepare(weight)
    assert as_if_compiled(kernel, ready)
    x = torch.randn(rows, weight.in_features, generator=torch.Generator().manual_seed(1))
    x = x.to(torch.bfloat16)
    dense = ready.dequantize()
    exact = x.double() @ dense.double().T

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    return error(kernel.matmul(x, ready)) / error(x @ dense.to(torch.bfloat16).T)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "k", "group", "zeros"),
    [
        (256, 256, 64, True),
        (192, 384, 128, False),
        (100, 256, 32, True),  # the last block is not full
        (48, 128, 64, True),  # one block, and that not full
        (128, 256, 256, True),  # one group
    ],
)
def test_tiles_of_affine_weights_are_as_right_as_dense_products(
    n: int, k: int, group: int, zeros: bool, dtype: torch.dtype, rows: int
) -> None:
    assert error_beside_torch(Int4Kernel(), affine(n, k, group, dtype, zeros=zeros), rows) < 1.1


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "widths",
    [[(4, 256)], [(4, 128), (3, 128), (2, 64)], [(8, 64), (6, 128), (5, 64), (4, 128)]],
    ids=str,
)
def test_tiles_of_mixed_widths_are_as_right_as_dense_products(
    widths: list[tuple[int, int]], rows: int
) -> None:
    kernel = Exl2CpuKernel()
    assert error_beside_torch(kernel, exl2(192, widths), rows) < 1.1


@pytest.mark.parametrize(
    ("blocks", "outputs"),
    [
        (7, 4),  # tiles of three and four blocks
        (5, 2),  # the first of one block, which is widened
        (9, 1000),  # a single tile
    ],
)
def test_a_matrix_of_many_tiles_is_the_blockwise_product(
    monkeypatch: pytest.MonkeyPatch, blocks: int, outputs: int
) -> None:
    monkeypatch.setattr(nibble_tiles, "TILE_WEIGHTS", 1)
    monkeypatch.setattr(nibble_tiles, "TILE_OUTPUTS", outputs * block_size())
    n = blocks * block_size()
    kernel, weight = Int4Kernel(), affine(n, 512, 128)
    ready = kernel.prepare(weight)
    assert as_if_compiled(kernel, ready)
    x = torch.randn(33, 512).to(torch.bfloat16)
    dense = ready.dequantize().to(torch.bfloat16)
    wanted = x @ dense.T
    torch.testing.assert_close(kernel.matmul(x, ready), wanted, rtol=2e-2, atol=2e-2)
    out = torch.empty(33, n, dtype=torch.bfloat16)
    assert kernel.matmul(x, ready, out=out) is out
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (affine(64, 192, 128), "its last group is shorter"),
        (exl2(176, [(4, 128)]), "its outputs do not fill blocks"),
    ],
    ids=["uneven", "left over"],
)
def test_what_tiles_cannot_decode_asks_for_no_compiler(weight: LinearWeight, why: str) -> None:
    kernel = Int4Kernel() if isinstance(weight, AffineWeight) else Exl2CpuKernel()
    assert not kernel.functions(kernel.prepare(weight)), why


def test_kernels_for_other_dtypes_ask_for_no_compiler() -> None:
    kernel = PlanarKernel()
    assert not kernel.functions(kernel.prepare(affine(128, 128, 64)))


def test_a_damaged_function_is_not_used(tmp_path: Path) -> None:
    path = function_path(tmp_path, DECODE_64)
    path.parent.mkdir()
    path.write_bytes(b"no package at all")
    assert load_function(path, DECODE_64) is None
    functions = [CompiledFunction(DECODE_64)]
    job = FunctionCompiler(functions, tmp_path)
    assert not job.use_packages()
    BackgroundCompiler((job,)).compile_now()  # compiles nothing: the file is there
    assert not job.is_compiled


def test_dimensions_of_one_run_as_written() -> None:
    function = CompiledFunction(DECODE_64)
    function.use(lambda tensors: pytest.fail("compiled code takes no dimension of one"))
    tile = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
    table = torch.ones(1, 1, 2, 32)
    function(torch.full((1, 1, 8, 32), 0x93, dtype=torch.uint8), table, table.half(), tile)
    assert tile[..., :32].eq(2).all()
    assert tile[..., 32:].eq(8).all()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_functions_are_compiled_once_and_give_the_same_bits(tmp_path: Path) -> None:
    source = DECODE_64 if block_size() == 64 else DECODE_32
    functions = [CompiledFunction(source), CompiledFunction(source)]
    job = FunctionCompiler(functions, tmp_path)
    assert not job.use_packages()
    BackgroundCompiler((job,)).compile_now()
    assert all(one.is_compiled for one in functions)
    again = FunctionCompiler([CompiledFunction(source)], tmp_path)
    assert again.use_packages()
    half = block_size() // 2
    for blocks, groups, inputs in [(2, 2, 16), (3, 5, 48), (9, 4, 128), (1, 3, 32)]:
        arguments = [t.clone() for t in example_arguments(source)]
        codes = arguments[0].flatten()[: blocks * groups * inputs * half]
        shape = (groups, blocks, 2, half)
        tables = [one.flatten()[: groups * blocks * 2 * half].view(shape) for one in arguments[1:3]]
        found, wanted = (
            torch.zeros(groups, inputs, blocks * 2 * half, dtype=torch.bfloat16) for _ in range(2)
        )
        codes = codes.view(blocks, groups, inputs, half)
        functions[0](codes, *tables, found)
        decode_blocks(codes, *tables, wanted)
        assert torch.equal(found, wanted), (blocks, groups, inputs)
