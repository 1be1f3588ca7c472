"""A small cache that keeps keys and values exactly, and lets the formats to be used see them.

Letters: T tokens, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.plugin import DeviceInfo, KVCacheFormat, KVCacheGeometry, KVStore

FIRST_BLOCK = 1
"""Block 0 is the null block."""


class WatchedCache(KVCacheFormat):
    """The exact format, that can show another format all that has been written.

    Args:
        exact: Stores and reads.
        form: Whose ``observe`` is called, or None.
        store: What it is called with.
    """

    name: ClassVar[str] = "watched"
    max_relative_error: ClassVar[Mapping[str, float]] = {}

    def __init__(self, exact: KVCacheFormat, form: KVCacheFormat | None, store: KVStore) -> None:
        self._exact = exact
        self._form = form
        self._store = store
        self._seen: list[torch.Tensor] = []

    @property
    def triton_read(self) -> Callable[..., Any] | None:
        """As the exact format; written is through ``write``, which shows what it is given."""
        return self._exact.triton_read

    def bytes_per_block(self, geometry: KVCacheGeometry) -> int:
        """As the exact format."""
        return self._exact.bytes_per_block(geometry)

    def allocate(self, geometry: KVCacheGeometry, num_blocks: int, device: DeviceInfo) -> KVStore:
        """As the exact format."""
        return self._exact.allocate(geometry, num_blocks, device)

    def write(self, store: KVStore, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Remembers ``x [T, H, D]`` where it is to be shown, and stores it."""
        if self._form is not None:
            self._seen.append(x.clone())
        self._exact.write(store, x, slot_mapping)

    def show(self) -> None:
        """Shows the format everything that was written, at once."""
        if self._form is not None and self._seen:
            self._form.observe(self._store, torch.cat(self._seen))

    def gather(self, store: KVStore, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """As the exact format."""
        return self._exact.gather(store, block_table, seq_len)

    def view(self, store: KVStore, first_block: int, num_tokens: int) -> torch.Tensor | None:
        """As the exact format."""
        return self._exact.view(store, first_block, num_tokens)


def watched_caches(
    caches: Sequence[LayerCache],
    exact: KVCacheFormat,
    num_blocks: int,
    device: DeviceInfo,
    measure: bool,
) -> tuple[LayerCache, ...]:
    """An exact cache for every one of ``caches``, whose formats see what it is given when
    ``measure`` is set and they want to."""

    def watched(form: KVCacheFormat, store: KVStore) -> WatchedCache:
        return WatchedCache(exact, form if measure and measures(form) else None, store)

    return tuple(
        LayerCache(
            k_format=watched(cache.k_format, cache.k_store),
            v_format=watched(cache.v_format, cache.v_store),
            k_store=exact.allocate(cache.k_store.geometry, num_blocks, device),
            v_store=exact.allocate(cache.v_store.geometry, num_blocks, device),
        )
        for cache in caches
    )


def measures(form: KVCacheFormat) -> bool:
    """Whether the format looks at keys or values before it stores any."""
    return type(form).observe is not KVCacheFormat.observe


def batches(
    token_ids: Sequence[int], block_size: int, chunk: int, device: torch.device
) -> Iterator[ForwardBatch]:
    """``token_ids`` as one sequence, computed in steps of ``chunk`` tokens."""
    length = len(token_ids)
    table = range(FIRST_BLOCK, FIRST_BLOCK - (-length // block_size))
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        positions = torch.arange(begin, end, device=device)
        span = SequenceSpan(
            start=0, stop=end - begin, seq_len=end, block_table=table, first_block=FIRST_BLOCK
        )
        yield ForwardBatch(
            token_ids=torch.tensor(list(token_ids[begin:end]), device=device),
            positions=positions,
            slot_mapping=positions + FIRST_BLOCK * block_size,
            spans=(span,),
        )
