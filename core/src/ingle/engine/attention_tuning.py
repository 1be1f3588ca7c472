"""Measures how a loaded model's decode steps attend fastest: for ``ingle compile`` on a card.

Imports triton: only for devices that have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ingle.attention.decode_launches import TUNED_SEQUENCES, DecodeShape
from ingle.attention.layer_cache import LayerCache
from ingle.attention.paged_cuda import PagedCUDAAttention
from ingle.attention.paged_triton import (
    PagedCache,
    PagedConfig,
    PagedRows,
    Softmax,
    paged_attention,
    paged_cache,
    workspace_bytes,
)
from ingle.engine.attention_trial import multi_processors
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.model.decoder import Decoder, SelfAttention
from ingle.plugin import DeviceInfo
from ingle.plugin.launches import TunedLaunches, launch_seconds

CONTEXTS = (1024, 8192)
"""Tokens of a sequence. A launch serves every length: what counts is the geometric mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Attention of one decode step in each of a model's layers.

    Attributes:
        query: [S, Q, D].
        layers: The caches.
        rows: For each context, the sequences.
        softmax: What happens to logits.
    """

    query: torch.Tensor
    layers: Sequence[PagedCache]
    rows: Sequence[PagedRows]
    softmax: Softmax

    def seconds(self, device: DeviceInfo, config: PagedConfig) -> float:
        """Per layer on the card, launched so; see ``launch_seconds``."""
        times = [launch_seconds(device, self._calls(rows, config)) for rows in self.rows]
        return math.prod(times) ** (1 / len(times))

    def _calls(self, rows: PagedRows, config: PagedConfig) -> list[partial[torch.Tensor]]:
        out = torch.empty_like(self.query)
        needed = workspace_bytes(self.query, self.layers[0], rows, config)
        space = torch.zeros(needed, dtype=torch.uint8, device=out.device)
        return [
            partial(
                paged_attention, self.query, layer, rows, config, self.softmax, out=out,
                workspace=space,
            )
            for layer in self.layers
        ]  # fmt: skip


def tune_attention(core: EngineCore, device: DeviceInfo, dtype: torch.dtype) -> list[str]:
    """What was found, a line for each number of sequences; none where attention gathers, or every
    layer has a sliding window.

    Args:
        core: The engine, which runs nothing meanwhile.
        device: The card.
        dtype: Of the activations.
    """
    runner = core.ahead.runner if core.ahead is not None else core.runner
    assert isinstance(runner, ModelRunner)
    layers = _unwindowed(runner)
    if not layers:
        return []
    first, cache = layers[0]
    shape, num_sms = _shape(first, cache, dtype), multi_processors(device)
    tuned, lines = TunedLaunches(device), []
    longest = core.scheduler.max_model_len
    for size in TUNED_SEQUENCES:
        if size > core.scheduler.limits.max_num_seqs:
            break
        step = _step(layers, size, longest, dtype)
        seconds = partial(step.seconds, device)
        lines.append(tuned.tune(shape.key(size), shape.launches(size, num_sms), seconds))
    return lines


def _unwindowed(runner: ModelRunner) -> list[tuple[SelfAttention, LayerCache]]:
    if not isinstance(runner.model, Decoder):
        return []
    attentions = [layer.attention for layer in runner.model.layers]
    return [
        (attention, cache)
        for attention, cache in zip(attentions, runner.caches, strict=True)
        if isinstance(attention.backend, PagedCUDAAttention)
        and attention.backend.softmax.window is None
    ]


def _shape(attention: SelfAttention, cache: LayerCache, dtype: torch.dtype) -> DecodeShape:
    assert isinstance(attention.backend, PagedCUDAAttention)
    return DecodeShape(
        num_heads=attention.shape.num_heads,
        num_kv_heads=attention.shape.num_kv_heads,
        head_dim=attention.shape.head_dim,
        block_size=cache.k_store.geometry.block_size,
        formats=(cache.k_format.name, cache.v_format.name),
        dtype=dtype,
        has_softcap=attention.backend.softmax.softcap is not None,
    )


def _step(
    layers: Sequence[tuple[SelfAttention, LayerCache]], size: int, longest: int, dtype: torch.dtype
) -> DecodeStep:
    """A step of ``size`` sequences, none longer than ``longest``, over the engine's own caches:
    whatever lies in them."""
    attention, cache = layers[0]
    assert isinstance(attention.backend, PagedCUDAAttention)
    place = next(iter(cache.k_store.tensors().values())).device
    shape = attention.shape
    pages = [page for _, cache in layers if (page := paged_cache(cache)) is not None]
    return DecodeStep(
        query=torch.randn(size, shape.num_heads, shape.head_dim, device=place).to(dtype),
        layers=pages,
        rows=[_rows(cache, size, min(context, longest), place) for context in CONTEXTS],
        softmax=attention.backend.softmax,
    )


def _rows(cache: LayerCache, size: int, context: int, place: torch.device) -> PagedRows:
    """Sequences of ``context`` tokens each; they share blocks where there are too few."""
    store = cache.k_store
    width = -(-context // store.geometry.block_size)
    blocks = torch.arange(size * width, device=place) % max(1, store.num_blocks - 1) + 1
    return PagedRows(
        block_table=blocks.view(size, width).int(),
        seq_lens=torch.full((size,), context, dtype=torch.int32, device=place),
        row_starts=torch.arange(size, dtype=torch.int32, device=place),
        new_lens=torch.ones(size, dtype=torch.int32, device=place),
        max_new=1,
    )
