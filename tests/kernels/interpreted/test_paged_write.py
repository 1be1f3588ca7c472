"""What Triton writes into a cache against what the formats' own ``write`` does, and the codecs'
integer arithmetic against every number there is."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreted_device import CARD
from paged_case import FORMATS

from ingle.attention.layer_cache import LayerCache
from ingle.attention.paged_triton import padded
from ingle.attention.paged_write import rotate_and_write
from ingle.model.rotary import rotate
from ingle.plugin import KVCacheGeometry
from ingle.plugin.hadamard_triton import turn_tile
from ingle_kv_fp8.codec import E4M3, E5M2, Codec
from ingle_kv_fp8.triton_io import decode_e4m3, decode_e5m2, encode_e4m3, encode_e5m2

HEADS, BLOCK, NUM_BLOCKS = 2, 16, 3


@triton.jit
def encode_kernel(x, out, ENCODE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, ENCODE(tl.load(x + at).to(tl.float32)))


@triton.jit
def decode_kernel(codes, out, IS_E4M3: tl.constexpr):
    at = tl.arange(0, 256)
    if IS_E4M3:
        values = decode_e4m3(tl.load(codes + at), False, False).to(tl.float32) * 256.0
    else:
        values = decode_e5m2(tl.load(codes + at)).to(tl.float32)
    tl.store(out + at, values)


def every_bfloat16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


CODECS = {"e4m3": (E4M3(), encode_e4m3), "e5m2": (E5M2(), encode_e5m2)}


def nearest(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Codes of float64 ``x``, by comparing it with the middles between the codec's numbers."""
    values = codec.decode(torch.arange(128, dtype=torch.uint8)).double()
    values = values[values.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs().clamp(max=values[-1])
    codes = torch.searchsorted(middles, size.contiguous(), right=False)
    at_middle = (codes < len(middles)) & (middles[codes.clamp(max=len(middles) - 1)] == size)
    codes += (at_middle & (codes % 2 == 1)).long()  # ties go to the even code
    return torch.where(torch.signbit(x), codes + 128, codes).to(torch.uint8)


@pytest.mark.parametrize("name", CODECS)
def test_integers_encode_every_bfloat16_to_nearest_even_and_saturate(name: str) -> None:
    codec, encode = CODECS[name]
    x = every_bfloat16()
    found = torch.zeros(len(x), dtype=torch.uint8)
    encode_kernel[(4,)](x, found, encode, len(x) // 4)
    is_nan = x.isnan()
    assert torch.equal(found[~is_nan], nearest(x.double()[~is_nan], codec))
    assert codec.decode(found[is_nan]).isnan().all()
    assert torch.equal(found[~is_nan], codec.encode(x[~is_nan]))


@pytest.mark.parametrize("name", CODECS)
def test_integers_decode_every_code_to_its_value(name: str) -> None:
    codec, _ = CODECS[name]
    codes, found = torch.arange(256, dtype=torch.uint8), torch.zeros(256)
    decode_kernel[(1,)](codes, found, name == "e4m3")
    wanted = codec.decode(codes).float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(found[:128]), torch.signbit(wanted[:128]))
    assert torch.signbit(found[128])


def cache_of(names: tuple[str, str], dim: int, dtype: torch.dtype) -> LayerCache:
    forms = [FORMATS[name]() for name in names]
    stores = [
        form.allocate(
            KVCacheGeometry(
                side=side, num_kv_heads=HEADS, head_dim=dim, block_size=BLOCK, dtype=dtype
            ),
            NUM_BLOCKS,
            CARD,
        )
        for form, side in zip(forms, ("k", "v"), strict=True)
    ]
    return LayerCache(k_format=forms[0], v_format=forms[1], k_store=stores[0], v_store=stores[1])


@pytest.mark.parametrize(
    ("names", "dim", "dtype"),
    [
        (("auto", "auto"), 64, torch.float16),
        (("fp8_e4m3", "fp8_e5m2"), 64, torch.bfloat16),
        (("int8", "auto"), 80, torch.float16),
        (("int8", "fp8_e4m3"), 128, torch.bfloat16),
        (("fp8_e4m3", "int8"), 80, torch.float16),
        (("fp8_e5m2", "auto"), 192, torch.bfloat16),
    ],
)
def test_rotating_and_writing_at_once_stores_what_two_steps_store(
    names: tuple[str, str], dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    joined = torch.randn(5, 3 + 2 * HEADS, dim).to(dtype)
    turning, value = joined[:, : 3 + HEADS], joined[:, 3 + HEADS :]
    angles = torch.rand(5, dim // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype).unsqueeze(1)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype).unsqueeze(1)
    slots = torch.tensor([35, 17, 47, 30, 16])
    fused, plain = cache_of(names, dim, dtype), cache_of(names, dim, dtype)
    for cache in (fused, plain):
        for form, store in ((cache.k_format, cache.k_store), (cache.v_format, cache.v_store)):
            form.observe(store, value.float() * 2)
    query = rotate_and_write(turning, value, (cos, sin), fused, slots)
    turned = rotate(turning, cos, sin)
    plain.write(turned[:, 3:], value, slots)
    assert query is not None
    assert torch.equal(query, turned[:, :3])
    for one, other in ((fused.k_store, plain.k_store), (fused.v_store, plain.v_store)):
        for name, tensor in one.tensors().items():
            apart = (tensor.float() - other.tensors()[name].float()).abs()
            # sums for the rotation come in another order, and may end on the other side of a middle
            assert apart.max() <= (0 if one.rotation is None else 1), name
            assert (apart > 0).float().mean() < 0.002, name


@triton.jit
def turn_kernel(x, out, D: tl.constexpr, DP: tl.constexpr):
    dim, row = tl.arange(0, DP)[:, None], tl.arange(0, 2)[None, :]
    tile = tl.load(x + row * D + dim, mask=dim < D, other=0.0)
    tl.store(out + row * DP + dim, turn_tile(tile, D))


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 112, 128, 192, 256])
def test_butterflies_multiply_by_the_matrix(dim: int) -> None:
    x = torch.randn(2, dim)
    out = torch.full((2, padded(dim)), float("nan"))
    turn_kernel[(1,)](x, out, dim, padded(dim))
    part = dim & -dim
    signs = torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(part)] for i in range(part)]
    )
    wanted = x.double().view(2, -1, part) @ (signs.double() / part**0.5)
    torch.testing.assert_close(out[:, :dim].double(), wanted.flatten(1), rtol=0, atol=2e-6)
    assert not out[:, dim:].any()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_turned_while_written_infinity_saturates_and_nan_stays(name: str) -> None:
    caches = [cache_of((name, name), 64, torch.bfloat16) for _ in range(2)]
    joined = torch.randn(3, 1 + 2 * HEADS, 64).bfloat16()
    joined[0, 1, 7], joined[1, 2, 4] = -float("inf"), float("nan")
    turning, value = joined[:, : 1 + HEADS], joined[:, 1 + HEADS :]
    slots = torch.tensor([17, 30, 47])
    for cache in caches:
        cache.k_format.observe(cache.k_store, value)
    assert rotate_and_write(turning, value, None, caches[0], slots) is not None
    caches[1].write(turning[:, 1:], value, slots)
    found, wanted = (
        cache.k_format.gather_stored(cache.k_store, torch.arange(NUM_BLOCKS), NUM_BLOCKS * BLOCK)
        for cache in caches
    )
    assert torch.equal(found.isnan(), wanted.isnan())
    assert found[1, 30].isnan().all()
    assert found.isnan().sum() == 64
    assert torch.equal(found[0, 17], wanted[0, 17])


@pytest.mark.parametrize(("name", "dim"), [("int4", 64), ("int4", 80)])
def test_four_bits_are_written_by_the_format_itself(name: str, dim: int) -> None:
    """Its numbers are rotated first, which no kernel does."""
    cache = cache_of((name, name), dim, torch.float16)
    x = torch.randn(2, 3, dim).half()
    assert rotate_and_write(x, x[:, :HEADS], None, cache, torch.tensor([1, 2])) is None
