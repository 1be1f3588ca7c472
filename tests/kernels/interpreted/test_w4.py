"""The 4-bit kernel against dense arithmetic that shares no code with it."""

from __future__ import annotations

import pytest
import torch

from ingle.builtin.affine_triton import (
    PackedW4,
    W4Config,
    default_w4_config,
    dequantize_w4,
    matmul_w4,
    matmul_w4_reference,
    pack_w4,
    w4_workspace_bytes,
)
from ingle.builtin.split_k_triton import COUNTER_BYTES


def make_weight(
    n: int, k: int, group_size: int, *, has_zeros: bool = True
) -> tuple[PackedW4, torch.Tensor]:
    """A random packed weight and the fp64 matrix it stands for."""
    generator = torch.Generator().manual_seed(n + k + group_size)
    groups = -(-k // group_size)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scales = (torch.rand(groups, n, generator=generator) * 0.01 + 0.005).half()
    zeros = torch.randint(0, 17, (groups, n), generator=generator) if has_zeros else None
    group = torch.arange(k) // group_size
    offset = zeros.T[:, group] if zeros is not None else 8
    dense = (codes - offset).double() * scales.double().T[:, group]
    return pack_w4(codes, scales, zeros, group_size), dense


def run(x: torch.Tensor, packed: PackedW4, config: W4Config, **options: object) -> torch.Tensor:
    out = torch.full((x.shape[0], packed.out_features), float("nan"))
    workspace = torch.zeros(w4_workspace_bytes(packed, x.shape[0], config), dtype=torch.uint8)
    matmul_w4(x, packed, config, out=out, workspace=workspace, **options)
    assert not workspace[:COUNTER_BYTES].any(), "counters must be left at zero"
    return out


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "group_size", "rows", "config"),
    [
        ((64, 256), 128, 1, W4Config(block_n=16, splits=2)),
        ((64, 256), 32, 8, W4Config(block_n=64)),
        ((80, 320), 64, 5, W4Config(splits=2, prefetch=False)),
        ((64, 512), 256, 32, W4Config(block_n=64, splits=3)),
        ((64, 192), 192, 13, W4Config()),
        ((16, 96), 96, 2, W4Config()),
    ],
)
def test_a_product_equals_dense_arithmetic(
    shape: tuple[int, int],
    group_size: int,
    rows: int,
    config: W4Config,
    dtype: torch.dtype,
) -> None:
    packed, dense = make_weight(*shape, group_size)
    x = torch.randn(rows, shape[1]).to(dtype)
    assert relative_error(run(x, packed, config), x.double() @ dense.T) < 2e-7


def test_without_zeros_every_zero_is_eight() -> None:
    packed, dense = make_weight(64, 256, 128, has_zeros=False)
    x = torch.randn(3, 256).half()
    assert relative_error(run(x, packed, W4Config()), x.double() @ dense.T) < 2e-7


def test_the_reference_and_the_dequantised_weight_are_exact() -> None:
    packed, dense = make_weight(48, 320, 64)
    assert torch.equal(dequantize_w4(packed), dense.float())
    x, residual = torch.randn(2, 320), torch.randn(2, 48)
    want = x.double() @ dense.T + residual
    assert relative_error(matmul_w4_reference(x, packed, residual), want) < 1e-6


@pytest.mark.parametrize("splits", [1, 2])
def test_the_residual_is_added_even_when_it_is_the_output(splits: int) -> None:
    packed, dense = make_weight(64, 256, 128)
    x, out = torch.randn(2, 256).half(), torch.randn(2, 64)
    want = x.double() @ dense.T + out.double()
    config = W4Config(splits=splits)
    workspace = torch.zeros(w4_workspace_bytes(packed, 2, config), dtype=torch.uint8)
    matmul_w4(x, packed, config, out=out, workspace=workspace, residual=out)
    assert relative_error(out, want) < 2e-7


def test_strided_and_misaligned_rows_are_served() -> None:
    packed, dense = make_weight(64, 128, 128)
    wide = torch.randn(3, 264).half()
    for x in (wide[:, :128], wide[:, 1:129], wide[:, ::2][:, :128]):
        assert relative_error(run(x, packed, W4Config()), x.double() @ dense.T) < 2e-7


def test_scales_may_be_bfloat16_or_float32() -> None:
    codes = torch.randint(0, 16, (16, 128))
    x = torch.randn(1, 128).half()
    for dtype in (torch.bfloat16, torch.float32):
        scales = (torch.rand(1, 16) * 1e-5).to(dtype)
        packed = pack_w4(codes, scales, None, 128)
        dense = (codes - 8).double() * scales.double().T
        assert relative_error(run(x, packed, W4Config()), x.double() @ dense.T) < 2e-7


def test_the_default_configuration_never_splits_finer_than_chunks() -> None:
    for n, k in ((64, 128), (4096, 4096), (576, 1536)):
        words = torch.empty(-(-n // 64) * 4, -(-k // 128), 0, dtype=torch.int16)
        packed = PackedW4(
            words=words,
            scales=words,
            zeros=None,
            out_features=n,
            in_features=k,
            group_size=128,
        )
        config = default_w4_config(packed)
        assert 1 <= config.splits <= max(1, k // 128)
        assert packed.padded[0] % config.block_n == 0


def test_what_the_kernel_cannot_serve_is_declined_with_the_value() -> None:
    codes, scales = torch.zeros(16, 128, dtype=torch.int32), torch.ones(1, 16)
    with pytest.raises(ValueError, match="in_features is 100"):
        pack_w4(torch.zeros(16, 100, dtype=torch.int32), scales, None, 100)
    with pytest.raises(ValueError, match="group size 48"):
        pack_w4(torch.zeros(16, 96, dtype=torch.int32), scales, None, 48)
    with pytest.raises(ValueError, match="must be integers"):
        pack_w4(codes, scales, torch.full((1, 16), 7.5), 128)
    with pytest.raises(ValueError, match=r"scales is \(2, 16\)"):
        pack_w4(codes, torch.ones(2, 16), None, 128)
    packed = pack_w4(codes, scales, None, 128)
    with pytest.raises(ValueError, match="33 rows"):
        run(torch.zeros(33, 128).half(), packed, W4Config())
    with pytest.raises(ValueError, match="float32"):
        run(torch.zeros(1, 128), packed, W4Config())
    with pytest.raises(ValueError, match="workspace"):
        matmul_w4(torch.zeros(1, 128).half(), packed, W4Config(splits=2), out=torch.empty(1, 16))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 32])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_every_row_count_and_block_size(rows: int, group_size: int, block_n: int) -> None:
    packed, dense = make_weight(128, 768, group_size)
    x = torch.randn(rows, 768).bfloat16()
    config = W4Config(block_n=block_n, splits=3)
    assert relative_error(run(x, packed, config), x.double() @ dense.T) < 2e-7
