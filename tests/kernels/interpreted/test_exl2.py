"""The EXL2 kernel against dense arithmetic that shares no code with it."""

from __future__ import annotations

import pytest
import torch

from ingle_quant_exl2.kernel import (
    COUNTER_BYTES,
    Exl2Config,
    default_splits,
    exl2_workspace_bytes,
    matmul_exl2,
    matmul_exl2_reference,
)
from ingle_quant_exl2.planes import (
    PackedExl2,
    dequantize_exl2,
    find_sections,
    pack_exl2,
    plan_splits,
)

Groups = list[tuple[int, int]]
MIXED: Groups = [(8, 32), (6, 32), (5, 64), (4, 128), (4, 128), (3, 64), (2, 64), (2, 32)]


def make_weight(groups: Groups, n: int) -> tuple[PackedExl2, torch.Tensor]:
    """A random packed weight with the given (bits, rows) groups, and its fp64 matrix."""
    generator = torch.Generator().manual_seed(len(groups) * n)
    bits, rows = (list(column) for column in zip(*groups, strict=True))
    group = torch.arange(len(groups)).repeat_interleave(torch.tensor(rows))
    bit = torch.tensor(bits)[group]
    codes = (torch.rand(n, len(group), generator=generator) * 2.0**bit).long()
    scale_codes = torch.randint(0, 16, (len(groups), n), generator=generator)
    group_scale = (torch.rand(len(groups), generator=generator) * 1e-3 + 1e-3).half()
    dense = (codes - 2 ** (bit - 1)).double() * (scale_codes.double().T[:, group] + 1) ** 2
    dense *= group_scale.double()[group]
    return pack_exl2(codes, scale_codes, group_scale, (bits, rows)), dense


def run(x: torch.Tensor, packed: PackedExl2, block_n: int = 32) -> torch.Tensor:
    out = torch.full((x.shape[0], packed.out_features), float("nan"))
    workspace = torch.zeros(exl2_workspace_bytes(packed, x.shape[0]), dtype=torch.uint8)
    matmul_exl2(x, packed, Exl2Config(block_n=block_n), out=out, workspace=workspace)
    assert not workspace[:COUNTER_BYTES].any(), "counters must be left at zero"
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_bit_width_with_a_short_last_group(bits: int) -> None:
    packed, dense = make_weight([(bits, 128), (bits, 128), (bits, 32)], 48)
    x = torch.randn(3, 288).half()
    assert relative_error(run(x, packed, 16), x.double() @ dense.T) < 2e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_matrix_of_all_widths_is_one_launch(dtype: torch.dtype) -> None:
    packed, dense = make_weight(MIXED, 64)
    assert packed.splits == 6
    x = torch.randn(8, packed.in_features).to(dtype)
    assert relative_error(run(x, packed, 64), x.double() @ dense.T) < 2e-7


def test_a_long_section_is_shared_by_several_programs() -> None:
    packed, dense = make_weight([(4, 32)] * 24 + [(3, 64)] * 4, 64)
    packed = plan_splits(packed, 5)
    assert packed.splits == 4
    x = torch.randn(13, packed.in_features).half()
    assert relative_error(run(x, packed), x.double() @ dense.T) < 2e-7


def test_a_single_program_along_k_needs_no_workspace() -> None:
    packed, dense = make_weight([(4, 128)] * 2, 64)
    x = torch.randn(1, 256).half()
    out = matmul_exl2(x, packed, Exl2Config(), out=torch.empty(1, 64), residual=torch.ones(1, 64))
    assert relative_error(out, x.double() @ dense.T + 1) < 2e-7


def test_the_reference_and_the_dequantised_weight_are_exact() -> None:
    packed, dense = make_weight(MIXED, 72)
    assert relative_error(dequantize_exl2(packed), dense) < 1e-7
    x = torch.randn(2, packed.in_features)
    assert relative_error(matmul_exl2_reference(x, packed), x.double() @ dense.T) < 1e-6


def test_a_short_chunk_stores_only_the_blocks_it_needs() -> None:
    packed, _ = make_weight([(3, 32)], 64)
    # 32 rows of 3 bits: one block of the 2-bit plane, one of the 1-bit plane
    assert packed.words.shape == (4, 2, 32, 8)


def test_irregular_groups_become_sections_of_their_own() -> None:
    groups = [(4, 64), (4, 32), (4, 128), (4, 96), (3, 64)]
    sections = find_sections(*(list(column) for column in zip(*groups, strict=True)))
    assert [(s.start, s.stop, s.group_size, s.group) for s in sections] == [
        (0, 96, 64, 0),
        (96, 320, 128, 2),
        (320, 384, 64, 4),
    ]
    packed, dense = make_weight(groups, 64)
    x = torch.randn(1, packed.in_features).half()
    assert relative_error(run(x, packed), x.double() @ dense.T) < 2e-7


def test_default_splits_cover_every_section() -> None:
    packed, _ = make_weight(MIXED, 64)
    assert default_splits(packed) >= len(packed.sections)


def test_what_the_kernel_cannot_serve_is_declined_with_the_value() -> None:
    with pytest.raises(ValueError, match="group 0 has 7 bits"):
        find_sections([7], [32])
    with pytest.raises(ValueError, match="group 1 has 48 rows"):
        find_sections([4, 4], [32, 48])
    packed, _ = make_weight([(4, 128)], 64)
    with pytest.raises(ValueError, match="33 rows"):
        run(torch.zeros(33, 128).half(), packed)
    with pytest.raises(ValueError, match="float32"):
        run(torch.zeros(1, 128), packed)
    with pytest.raises(ValueError, match="x has 64 features"):
        run(torch.zeros(1, 64).half(), packed)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_every_bit_width_group_size_and_tail(bits: int, size: int, rows: int) -> None:
    for tail in range(32, size + 1, 32):
        packed, dense = make_weight([(bits, size)] * (512 // size + 1) + [(bits, tail)], 64)
        packed = plan_splits(packed, 2)
        x = torch.randn(rows, packed.in_features).half()
        assert relative_error(run(x, packed), x.double() @ dense.T) < 2e-7
