"""Gathered attention against the float32 reference, over caches laid out for both devices."""

from __future__ import annotations

import pytest
import torch

from ingle.attention.gathered import GatheredAttention
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan, consecutive_start
from ingle.attention.reference import ReferenceAttention
from ingle.builtin.kv_native import NativeKVCache
from ingle.plugin import DeviceInfo, KVCacheGeometry

HEADS, KV_HEADS, DIM, BLOCK, NUM_BLOCKS = 6, 2, 32, 16, 12
TABLES = ((3, 1, 7, 2), (4, 5, 6, 8), (10, 9, 11))


class CardOnCpu(DeviceInfo):
    """Says ``cuda`` where formats ask what it is, and ``cpu`` where torch asks where it is."""

    @property
    def torch_device(self) -> str:
        return "cpu"


DEVICES = {"cpu": DeviceInfo(type="cpu"), "cuda": CardOnCpu(type="cuda", capability=(8, 9))}


def full_cache(device: DeviceInfo) -> LayerCache:
    """A cache full of normal numbers."""
    form = NativeKVCache()
    torch.manual_seed(1)
    stores = []
    for side in ("k", "v"):
        geometry = KVCacheGeometry(
            side=side, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK, dtype=torch.float32
        )
        stores.append(form.allocate(geometry, NUM_BLOCKS, device))
    cache = LayerCache(k_format=form, v_format=form, k_store=stores[0], v_store=stores[1])
    x = torch.randn(2, NUM_BLOCKS * BLOCK, KV_HEADS, DIM)
    cache.write(x[0], x[1], torch.arange(NUM_BLOCKS * BLOCK))
    return cache


def batch_of(lengths: list[tuple[int, int]]) -> ForwardBatch:
    """Sequences of (new tokens, tokens in the cache)."""
    spans, start = [], 0
    for (new, length), table in zip(lengths, TABLES, strict=False):
        used = -(-length // BLOCK)
        spans.append(
            SequenceSpan(
                start=start,
                stop=start + new,
                seq_len=length,
                block_table=table,
                first_block=consecutive_start(table, used),
            )
        )
        start += new
    unused = torch.zeros(start, dtype=torch.int64)
    return ForwardBatch(token_ids=unused, positions=unused, slot_mapping=unused, spans=tuple(spans))


@pytest.mark.parametrize("window", [None, 5, 20, 300])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "lengths", [[(1, 60), (1, 1), (1, 33)], [(60, 60)], [(9, 50), (1, 40), (17, 48)], [(2, 2)]]
)
@torch.inference_mode()
def test_it_equals_the_reference(
    lengths: list[tuple[int, int]], device: str, window: int | None
) -> None:
    cache, batch = full_cache(DEVICES[device]), batch_of(lengths)
    query = torch.randn(batch.spans[-1].stop, HEADS, DIM)
    wanted = ReferenceAttention(DIM**-0.5, window)(query, cache, batch)
    found = GatheredAttention(DIM**-0.5, window)(query, cache, batch)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-5)


@torch.inference_mode()
def test_a_prompt_in_tiles_is_the_same_as_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, batch = full_cache(DEVICES["cuda"]), batch_of([(50, 60)])
    query = torch.randn(50, HEADS, DIM)
    whole = GatheredAttention(DIM**-0.5, has_flash=True)(query, cache, batch)
    monkeypatch.setattr("ingle.attention.gathered.LOGITS", 1)
    tiled = GatheredAttention(DIM**-0.5)(query, cache, batch)
    assert torch.allclose(whole, tiled, atol=1e-5)
