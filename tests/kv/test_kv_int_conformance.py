"""The integer caches held to what every cache format is held to, and to a plain oracle."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch

from ingle.builtin.kv_int_formats import Int4KVCache, Int8KVCache, IntKVCache
from ingle.builtin.reused_buffer import ReusedBuffer
from ingle.plugin import DeviceInfo, KVCacheGeometry, PluginError
from ingle.testing import KVCacheFormatConformance

CPU = DeviceInfo(type="cpu", capability=None, total_memory=1 << 30, name="cpu")


class TestInt8(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.kv_int"
    format_name: ClassVar[str] = "int8"


class TestInt4(KVCacheFormatConformance):
    plugin_module: ClassVar[str] = "ingle.builtin.kv_int"
    format_name: ClassVar[str] = "int4"


def geometry(
    dim: int, dtype: torch.dtype = torch.bfloat16, side: Literal["k", "v"] = "k"
) -> KVCacheGeometry:
    return KVCacheGeometry(side=side, num_kv_heads=2, head_dim=dim, block_size=16, dtype=dtype)


def rotation(dim: int) -> torch.Tensor:
    """Entry (i, j) of a block is the parity of the bits that i and j share, made by Walsh."""
    size = dim & -dim
    at = torch.arange(size)
    shared = at[:, None] & at[None, :]
    parity = sum((shared >> bit) & 1 for bit in range(size.bit_length())) % 2
    block = (1 - 2 * parity).double() / size**0.5
    return torch.block_diag(*[block] * (dim // size))


def round_trip(form: IntKVCache, x: torch.Tensor) -> torch.Tensor:
    store = form.allocate(geometry(x.shape[-1], x.dtype), 1 + -(-len(x) // 16), CPU)
    form.write(store, x, torch.arange(16, 16 + len(x)))
    table = torch.arange(1, store.num_blocks)
    return form.gather(store, table, len(x)).transpose(0, 1)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(("form", "group"), [(Int8KVCache(), None), (Int4KVCache(), 32)])
def test_no_value_is_off_by_more_than_half_a_step_of_its_group(
    form: IntKVCache, group: int | None, dim: int
) -> None:
    x = torch.randn(40, 2, dim, generator=torch.Generator().manual_seed(dim))
    found = round_trip(form, x).double()
    if group is not None:  # rounded after a rotation, which changes no lengths
        x, found = x.double() @ rotation(dim), found @ rotation(dim)
    size = dim if group is None else (16 if dim % 32 else 32)
    groups = x.double().unflatten(-1, (-1, size))
    step = groups.abs().amax(-1, keepdim=True) / (127 if group is None else 8)
    # The far end of an int4 group has no code of its own: it may be off by a whole step.
    allowed = step * (0.5001 if group is None else 1.0001)
    assert ((found.unflatten(-1, (-1, size)) - groups).abs() <= allowed).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_the_rotation_is_walshs_matrix_block_by_block(dim: int) -> None:
    store = Int4KVCache().allocate(geometry(dim, torch.float32), 2, CPU)
    assert store.rotation is not None
    torch.testing.assert_close(store.rotation.double(), rotation(dim))
    torch.testing.assert_close(rotation(dim) @ rotation(dim).T, torch.eye(dim).double())


@pytest.mark.parametrize("form", [Int8KVCache(), Int4KVCache()])
def test_zeros_come_back_as_zeros_and_what_is_not_finite_stays_visible(form: IntKVCache) -> None:
    x = torch.zeros(3, 2, 64)
    x[1, 0, 5], x[2, 1, 7] = float("nan"), float("inf")
    found = round_trip(form, x)
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[1, 1], x[1, 1])
    assert not found[1, 0].isfinite().all()
    assert not found[2, 1].isfinite().all()


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("form", [Int8KVCache(), Int4KVCache()])
def test_rows_of_any_size_are_kept_as_well_as_others(form: IntKVCache, scale: float) -> None:
    x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    error = (round_trip(form, (x * scale).bfloat16()).float() / scale - x.float()).norm()
    assert error <= form.max_relative_error["bfloat16"] * x.float().norm()


@pytest.mark.parametrize(("form", "bits"), [(Int8KVCache(), 8.25), (Int4KVCache(), 4.5)])
def test_a_block_takes_its_codes_and_scales_and_nothing_else(form: IntKVCache, bits: float) -> None:
    assert form.bytes_per_block(geometry(64)) * 8 == bits * 2 * 16 * 64


def test_an_odd_head_size_is_refused_by_int4() -> None:
    with pytest.raises(PluginError, match="even head size"):
        Int4KVCache().bytes_per_block(geometry(33))


def test_a_buffer_is_used_again_only_when_nobody_holds_it() -> None:
    buffer = ReusedBuffer()
    first = buffer.take((4, 8), torch.float32, torch.device("cpu"))
    place, kept = first.data_ptr(), first[1:].transpose(0, 1)
    del first
    second = buffer.take((4, 8), torch.float32, torch.device("cpu"))
    assert second.data_ptr() != place
    place = second.data_ptr()
    del second
    assert buffer.take((2, 8), torch.float32, torch.device("cpu")).data_ptr() == place
    assert kept.shape == (8, 3)
