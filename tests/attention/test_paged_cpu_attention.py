"""The CPU attention against the float32 reference, over every shape of batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest
import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan, consecutive_start
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.attention.reference import ReferenceAttention, attend
from ingle.attention.softcapped import SoftcappedAttention
from ingle.builtin.kv_int_formats import Int4KVCache
from ingle.builtin.kv_native import NativeKVCache
from ingle.plugin import DeviceInfo, KVCacheFormat, KVCacheGeometry
from ingle_kv_fp8.format import Fp8E4M3Format

BLOCK = 16
SIDES: tuple[Literal["k"], Literal["v"]] = ("k", "v")


TURNING: Mapping[str, type[KVCacheFormat]] = {
    form.name: form for form in (NativeKVCache, Int4KVCache, Fp8E4M3Format)
}


def make_cache(
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    forms: tuple[KVCacheFormat, KVCacheFormat] = (NativeKVCache(), NativeKVCache()),
) -> LayerCache:
    k, v = (
        form.allocate(
            KVCacheGeometry(
                side=side,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=BLOCK,
                dtype=dtype,
            ),
            64,
            DeviceInfo(type="cpu"),
        )
        for form, side in zip(forms, SIDES, strict=True)
    )
    return LayerCache(k_format=forms[0], v_format=forms[1], k_store=k, v_store=v)


def fill(cache: LayerCache, blocks: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes ``length`` random tokens into ``blocks``; returns keys and values [H, L, D]."""
    geometry = cache.k_store.geometry
    shape = (length, geometry.num_kv_heads, geometry.head_dim)
    key, value = torch.randn(shape).to(geometry.dtype), torch.randn(shape).to(geometry.dtype)
    slots = torch.tensor([blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)])
    cache.write(key, value, slots)
    return key.transpose(0, 1), value.transpose(0, 1)


def span(start: int, num_new: int, length: int, blocks: list[int]) -> SequenceSpan:
    used = -(-length // BLOCK)
    return SequenceSpan(
        start=start,
        stop=start + num_new,
        seq_len=length,
        block_table=blocks,
        first_block=consecutive_start(blocks, used),
    )


def batch_of(*spans: SequenceSpan) -> ForwardBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(token_ids=none, positions=none, slot_mapping=none, spans=spans)


SCATTERED = [9, 3, 17, 5, 30, 2, 41, 8, 22, 11, 50, 13, 60]
IN_A_ROW = list(range(4, 20))


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("blocks", [SCATTERED, IN_A_ROW], ids=["scattered", "consecutive"])
@pytest.mark.parametrize(("num_new", "length"), [(1, 1), (1, 77), (5, 5), (30, 130), (150, 150)])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_attention_equals_the_reference(
    groups: int, num_new: int, length: int, blocks: list[int], window: int | None
) -> None:
    torch.manual_seed(length + groups)
    cache = make_cache(2, 32, torch.float32)
    fill(cache, blocks, length)
    query = torch.randn(num_new, 2 * groups, 32)
    batch = batch_of(span(0, num_new, length, blocks))
    found = PagedCPUAttention(0.17, window)(query, cache, batch)
    wanted = ReferenceAttention(0.17, window)(query, cache, batch)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("names", ["fp8_e4m3,auto", "int4,int4", "auto,int4"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 5.0)])
@pytest.mark.parametrize(("num_new", "length"), [(1, 77), (30, 130)])
def test_caches_that_store_turned_numbers_equal_the_reference(
    num_new: int, length: int, window: int | None, softcap: float | None, names: str
) -> None:
    torch.manual_seed(length)
    forms = [TURNING[name]() for name in names.split(",")]
    cache = make_cache(2, 32, torch.float32, (forms[0], forms[1]))
    forms[0].observe(cache.k_store, torch.randn(9, 2, 32))
    assert cache.k_store.rotation is not None or cache.v_store.rotation is not None
    fill(cache, SCATTERED, length)
    query = torch.randn(num_new, 6, 32)
    batch = batch_of(span(0, num_new, length, SCATTERED))
    found = PagedCPUAttention(0.17, window, softcap)(query, cache, batch)
    wanted = ReferenceAttention(0.17, window, softcap)(query, cache, batch)
    torch.testing.assert_close(found, wanted, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("softcap", [0.5, 50.0, 500.0])
@pytest.mark.parametrize("window", [None, 7, 140])
@pytest.mark.parametrize(("num_new", "length"), [(1, 1), (1, 190), (30, 130), (150, 150)])
@pytest.mark.parametrize("groups", [1, 3])
def test_bounded_attention_equals_the_reference(
    groups: int, num_new: int, length: int, window: int | None, softcap: float
) -> None:
    torch.manual_seed(length + groups)
    cache = make_cache(2, 32, torch.float32)
    fill(cache, SCATTERED, length)
    query = torch.randn(num_new, 2 * groups, 32) * 4
    batch = batch_of(span(0, num_new, length, SCATTERED))
    found = PagedCPUAttention(0.7, window, softcap)(query, cache, batch)
    wanted = ReferenceAttention(0.7, window, softcap)(query, cache, batch)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_bounded_attention_over_many_tiles_equals_the_reference() -> None:
    torch.manual_seed(3)
    query, key, value = torch.randn(700, 4, 8), torch.randn(2, 1300, 8), torch.randn(2, 1300, 8)
    for window in (None, 300):
        found = SoftcappedAttention(0.9, 20.0, window)(query, key, value)
        wanted = attend(query, key, value, 0.9, window, 20.0).flatten(1)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_bounds_bound_and_high_ones_change_nothing() -> None:
    torch.manual_seed(4)
    query, key, value = torch.randn(9, 4, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    free = attend(query, key, value, 0.25)
    torch.testing.assert_close(attend(query, key, value, 0.25, softcap=1e5), free)
    # Logits that may not differ weigh every key alike.
    alike = attend(query, key, value, 0.25, softcap=1e-6)[-1]
    mean = value.mean(1).repeat_interleave(2, 0)
    torch.testing.assert_close(alike, mean, rtol=1e-4, atol=1e-4)


def test_the_reference_equals_torchs_own_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 16), torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attend(query, key, value, 0.25), wanted[0].transpose(0, 1))


def test_sequences_in_one_batch_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    cache = make_cache(2, 32, torch.float32)
    first, second = [1, 2, 3], [7, 5, 9]
    fill(cache, first, 40)
    fill(cache, second, 35)
    query = torch.randn(6, 4, 32)
    attention = PagedCPUAttention(0.2)
    together = attention(query, cache, batch_of(span(0, 1, 40, first), span(1, 5, 35, second)))
    alone = torch.cat(
        [
            attention(query[:1], cache, batch_of(span(0, 1, 40, first))),
            attention(query[1:], cache, batch_of(span(0, 5, 35, second))),
        ]
    )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
def test_every_head_size_works_in_bfloat16(head_dim: int) -> None:
    torch.manual_seed(2)
    cache = make_cache(2, head_dim, torch.bfloat16)
    fill(cache, SCATTERED, 70)
    query = torch.randn(20, 4, head_dim).bfloat16()
    batch = batch_of(span(0, 20, 70, SCATTERED))
    scale = head_dim**-0.5
    found = PagedCPUAttention(scale)(query, cache, batch).float()
    wanted = ReferenceAttention(scale)(query, cache, batch).float()
    assert (found - wanted).norm() / wanted.norm() < 1e-2
