"""Triton's attention, tried out on the device before it serves: right or not, and compiled.

Imports triton: only for devices that have it.
"""

from __future__ import annotations

import torch
from triton.errors import TritonError

from ingle.attention.decode_launches import DecodeLaunches, DecodeShape
from ingle.attention.decode_rows import StepPlanner
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cuda import PagedCUDAAttention, PagedScratch
from ingle.attention.paged_triton import Softmax, paged_cache
from ingle.attention.reference import ReferenceAttention
from ingle.engine.attention_choice import AttentionNeeds, BackendMaker
from ingle.plugin import DeviceInfo
from ingle.plugin.launches import TunedLaunches

TOLERANCE = 0.02
"""Relative Frobenius error of attention in 16 bit, with room to spare."""
SEED = 20260103
NUM_BLOCKS = 5
TRIAL_PROMPT = 40
TRIAL_WINDOW = 24
INTERPRETED_SMS = 4


def paged_attention(needs: AttentionNeeds) -> tuple[BackendMaker, str]:
    """Triton's attention, and what is wrong with it here, or an empty string."""
    geometry, launches = needs.geometry[0], _decode_launches(needs)
    scratch = PagedScratch(StepPlanner(geometry.block_size), launches)

    def maker(window: int | None) -> PagedCUDAAttention:
        softmax = Softmax(scale=needs.scale, window=window, softcap=needs.softcap)
        return PagedCUDAAttention(softmax, scratch)

    cache = _cache(needs)
    if paged_cache(cache) is None:
        names = ", ".join(dict.fromkeys(form.name for form in needs.formats))
        return maker, f"the KV cache {names} has no layout that the kernel reads"
    group = needs.num_heads // geometry.num_kv_heads
    sizes = launches.batch_sizes(geometry.num_kv_heads, geometry.head_dim, group)
    batches: list[tuple[int | None, ForwardBatch]]
    batches = [(None, _batch(needs, size)) for size in sizes]
    batches += [(window, _batch(needs, 2, TRIAL_PROMPT)) for window in (None, TRIAL_WINDOW)]
    reasons = (_trial(maker(window), window, cache, needs, batch) for window, batch in batches)
    return maker, next(filter(None, reasons), "")


def multi_processors(device: DeviceInfo) -> int:
    """The card's multiprocessors; few in the interpreter."""
    return device.multi_processors or INTERPRETED_SMS


def _decode_launches(needs: AttentionNeeds) -> DecodeLaunches:
    """As was measured on the card, where somebody did."""
    geometry, num_sms = needs.geometry[0], multi_processors(needs.device)
    shape = DecodeShape(
        num_heads=needs.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
        formats=(needs.formats[0].name, needs.formats[1].name),
        dtype=needs.dtype,
        has_softcap=needs.softcap is not None,
    )
    measured = shape.measured(TunedLaunches(needs.device), num_sms)
    return DecodeLaunches(num_sms=num_sms, measured=measured)


def _trial(
    backend: PagedCUDAAttention,
    window: int | None,
    cache: LayerCache,
    needs: AttentionNeeds,
    batch: ForwardBatch,
) -> str:
    """Attends for ``batch``, against the reference on the same cache: what is wrong, or an empty
    string."""
    query = _normal(needs, batch.token_ids.shape[0], needs.num_heads)
    reference = ReferenceAttention(needs.scale, window, needs.softcap)
    wanted = reference(query, cache, batch).float()
    try:
        found = backend(query, cache, batch).float()
    except (TritonError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"the Triton kernel failed: {lines[0]}"
    if needs.device.is_absent:
        return ""
    error_norm = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
    if not error_norm <= TOLERANCE:
        return f"the Triton kernel is wrong by {error_norm:.2g} (relative) on this device"
    return ""


def _cache(needs: AttentionNeeds) -> LayerCache:
    """A small cache of the chosen formats, full of normal numbers but for the null block."""
    (k_format, v_format), (k, v) = needs.formats, needs.geometry
    cache = LayerCache(
        k_format=k_format,
        v_format=v_format,
        k_store=k_format.allocate(k, NUM_BLOCKS, needs.device),
        v_store=v_format.allocate(v, NUM_BLOCKS, needs.device),
    )
    slots = torch.arange(k.block_size, NUM_BLOCKS * k.block_size)
    tokens = _normal(needs, slots.shape[0], k.num_kv_heads)
    cache.write(tokens, tokens.flip(0), slots.to(needs.device.torch_device))
    return cache


def _batch(needs: AttentionNeeds, size: int, num_new: int = 1) -> ForwardBatch:
    """The last ``num_new`` tokens of ``size`` sequences that share their blocks."""
    blocks = tuple(range(1, NUM_BLOCKS))
    longest = len(blocks) * needs.geometry[0].block_size
    spans = tuple(
        SequenceSpan(
            start=row * num_new,
            stop=(row + 1) * num_new,
            seq_len=num_new + (longest - num_new - 7 - 13 * row) % (longest + 1 - num_new),
            block_table=blocks,
            first_block=1,
        )
        for row in range(size)
    )
    places = torch.zeros(size * num_new, dtype=torch.int64, device=needs.device.torch_device)
    return ForwardBatch(token_ids=places, positions=places, slot_mapping=places, spans=spans)


def _normal(needs: AttentionNeeds, tokens: int, heads: int) -> torch.Tensor:
    """The same standard normal numbers every time: [tokens, heads, D]."""
    generator = torch.Generator().manual_seed(SEED + heads)
    x = torch.randn(tokens, heads, needs.geometry[0].head_dim, generator=generator)
    return x.to(device=needs.device.torch_device, dtype=needs.dtype)
