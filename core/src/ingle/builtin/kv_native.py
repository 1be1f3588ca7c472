"""The built-in cache: keys and values kept as they are, in the activation dtype.

Shape letters: T tokens, H key/value heads, D head size, B blocks, S tokens in a block.

Layout on a CPU: one tensor [H, B, S, D]. The head is outermost, so the tokens of consecutive blocks
lie side by side within a head and attention reads a sequence in place. On CUDA: keys [B, H, S, D],
values transposed, [B, H, D, S], as core's decode attention reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ingle.plugin import (
    CompiledSide,
    DeviceInfo,
    KVCacheFormat,
    KVCacheGeometry,
    KVStore,
    PagedSide,
    hookimpl,
    read_plain,
    write_plain,
)

if TYPE_CHECKING:
    import torch

INGLE_PLUGIN_API = (0, 1)

SERIAL_ELEMENTS = 32768
"""``index_copy_`` on a CPU spreads larger copies over threads (ATen's grain size), and then the
order in which two writes to one slot happen is not defined."""

RUN_TOKENS = 64
"""From this many tokens on it pays to look whether their slots are one run: a prompt's usually
are, and a run is copied about ten times as fast."""


class NativeStore(KVStore):
    """One side of one layer in ``geometry.dtype``, head by head.

    Attributes:
        blocks: [B, H, S, D], a view: what core copies and counts.
        heads: [H, B, S, D], the storage.
        flat: [H, B*S, D], a view: a sequence in consecutive blocks is a slice of it.
        tokens: [B*S, H, D], a view: dimension 0 is the slot.
    """

    def __init__(
        self, geometry: KVCacheGeometry, num_blocks: int, device: str | torch.device
    ) -> None:
        import torch

        self.geometry = geometry
        self.num_blocks = num_blocks
        shape = (geometry.num_kv_heads, num_blocks, geometry.block_size, geometry.head_dim)
        # Zeroed, so that every page is touched now: memory use is what the plan says from the start
        # on, and no step waits for the system to find a page.
        self.heads = torch.zeros(shape, dtype=geometry.dtype, device=device)
        self.blocks = self.heads.transpose(0, 1)
        self.flat = self.heads.flatten(1, 2)
        self.tokens = self.flat.transpose(0, 1)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``data``: [B, H, S, D], a view whose dimension 0 is the block."""
        return {"data": self.blocks}

    def compiled(self) -> CompiledSide:
        """The storage itself."""
        return CompiledSide(tensors=(self.heads,), read=read_plain, write=write_plain)


class BlockMajorStore(KVStore):
    """One side of one layer in ``geometry.dtype``, block by block.

    Attributes:
        storage: Keys [B, H, S, D], values [B, H, D, S].
        blocks: [B, H, S, D], a view of it: what core copies and counts.
        slots: [B, S, H, D], a view of it.
    """

    def __init__(
        self, geometry: KVCacheGeometry, num_blocks: int, device: str | torch.device
    ) -> None:
        import torch

        self.geometry = geometry
        self.num_blocks = num_blocks
        token = (geometry.block_size, geometry.head_dim)
        tile = token if geometry.side == "k" else token[::-1]
        shape = (num_blocks, geometry.num_kv_heads, *tile)
        # Zeroed: what is masked out of attention must still not be NaN in every kernel.
        self.storage = torch.zeros(shape, dtype=geometry.dtype, device=device)
        self.blocks = self.storage if geometry.side == "k" else self.storage.transpose(2, 3)
        self.slots = self.blocks.transpose(1, 2)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``data``: [B, H, S, D], a view whose dimension 0 is the block."""
        return {"data": self.blocks}

    def paged(self) -> PagedSide:
        """The storage, and how it lies."""
        meta = (self.geometry.num_kv_heads, self.geometry.side == "v")
        return PagedSide(tensors=(self.storage,), meta=meta)

    def write(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores ``x [T, H, D]`` at ``slot_mapping`` (int64 [T])."""
        size = self.geometry.block_size
        if slot_mapping.shape[0] > 1:
            x = x.index_select(0, last_occurrence(slot_mapping))
        self.slots[slot_mapping // size, slot_mapping % size] = x

    def gather(self, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """[H, seq_len, D], a view of a copy [seq_len, H, D]."""
        return self.slots.index_select(0, block_table).flatten(0, 1)[:seq_len].transpose(0, 1)


class NativeKVCache(KVCacheFormat):
    """Stores exactly what it is given; what ``--kv-cache-dtype auto`` means."""

    name: ClassVar[str] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "bf16", "fp16", "native")
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 0.0,
        "float16": 0.0,
        "bfloat16": 0.0,
    }

    @property
    def triton_read(self) -> Callable[..., Any]:
        """See ``kv_native_triton``."""
        from ingle.builtin.kv_native_triton import read_native

        function: Callable[..., Any] = read_native
        return function

    @property
    def triton_write(self) -> Callable[..., Any]:
        """See ``kv_native_triton``."""
        from ingle.builtin.kv_native_triton import write_native

        function: Callable[..., Any] = write_native
        return function

    def bytes_per_block(self, geometry: KVCacheGeometry) -> int:
        """H * S * D values of the activation dtype."""
        values = geometry.num_kv_heads * geometry.block_size * geometry.head_dim
        return values * geometry.dtype.itemsize

    def allocate(
        self, geometry: KVCacheGeometry, num_blocks: int, device: DeviceInfo
    ) -> NativeStore | BlockMajorStore:
        """Storage on ``device``; a slot holds nothing of meaning before it is written."""
        kind = BlockMajorStore if device.type == "cuda" else NativeStore
        return kind(geometry, num_blocks, device.torch_device)

    def write(self, store: KVStore, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores ``x [T, H, D]`` at ``slot_mapping`` (int64 [T]); one small copy for one token."""
        import torch

        x = x.to(store.geometry.dtype)
        if isinstance(store, BlockMajorStore):
            store.write(x, slot_mapping)
            return
        tokens = cast(NativeStore, store).tokens
        if x.numel() <= SERIAL_ELEMENTS and x.shape[0] < RUN_TOKENS:
            tokens.index_copy_(0, slot_mapping, x)
        elif is_run(slot_mapping):
            tokens.narrow(0, int(slot_mapping[0]), x.shape[0]).copy_(x)
        else:
            step = max(1, SERIAL_ELEMENTS // x[0].numel())
            for part, slots in zip(
                torch.split(x, step), torch.split(slot_mapping, step), strict=True
            ):
                tokens.index_copy_(0, slots, part)

    def gather(self, store: KVStore, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """[H, seq_len, D], copied block by block."""
        if isinstance(store, BlockMajorStore):
            return store.gather(block_table, seq_len)
        blocks = cast(NativeStore, store).heads.index_select(1, block_table)
        return blocks.flatten(1, 2)[:, :seq_len]

    def view(self, store: KVStore, first_block: int, num_tokens: int) -> torch.Tensor | None:
        """[H, num_tokens, D] in place, over as many consecutive blocks as that takes; None where
        blocks are outermost."""
        if isinstance(store, BlockMajorStore):
            return None
        start = first_block * store.geometry.block_size
        return cast(NativeStore, store).flat.narrow(1, start, num_tokens)


def is_run(slots: torch.Tensor) -> bool:
    """Whether ``slots`` (int64 [T], on a CPU, T > 0) are consecutive numbers."""
    import torch

    first = int(slots[0])
    return torch.equal(slots, torch.arange(first, first + slots.shape[0]))


def last_occurrence(slots: torch.Tensor) -> torch.Tensor:
    """For each entry of ``slots`` (int64 [T]) the last index that holds the same slot: int64 [T].

    Reading ``x`` through it makes every write to one slot write the same value, so that their
    order no longer matters.
    """
    import torch

    ordered, order = slots.sort(stable=True)
    return order[torch.searchsorted(ordered, slots, right=True) - 1]


@hookimpl
def ingle_kv_cache_formats(device: DeviceInfo) -> list[KVCacheFormat]:
    """The native cache, on every device."""
    return [NativeKVCache()]
