"""Integer caches: codes with a scale of their own for every token and head, so that nothing needs
to be calibrated.

    int8   x ~ code * scale, code from -127 to 127, one scale per token and head
    int4   x ~ (code - 8) * scale, code from 0 to 15, one scale per 32 values of a token and head

An int4 scale is the value of largest magnitude divided by -8, sign and all, so that this value has
a code of its own. Scales have the activation dtype: 16 bits in a 16-bit model. A row that holds
infinity or NaN reads back as NaN: what went wrong stays visible.

Letters: T tokens, H key/value heads, D head size, B blocks, S tokens in a block, G scales of a
token and head, C bytes of its codes.

Sizes are told without torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ingle.builtin.kv_native import last_occurrence
from ingle.builtin.reused_buffer import ReusedBuffer
from ingle.plugin import (
    CompiledSide,
    DeviceInfo,
    KVCacheFormat,
    KVCacheGeometry,
    KVStore,
    PagedSide,
    PluginError,
    hadamard,
)

if TYPE_CHECKING:
    import torch

INT4_GROUP = 32
"""Values that share an int4 scale; fewer where the head size is no multiple of it."""
LARGEST_INT8 = 127


class IntStore(KVStore):
    """One side of one layer. On a CPU the head is outermost, as in the native cache; on CUDA the
    block is, and the tokens of values are innermost, see ``kv_int_triton``.

    Attributes:
        codes: int8 or uint8 [H, B, S, C], the storage or a view of it.
        scales: [H, B, S, G] in the activation dtype, the same.
    """

    def __init__(
        self,
        geometry: KVCacheGeometry,
        num_blocks: int,
        device: DeviceInfo,
        row: tuple[str, int, int],
        *,
        is_rotated: bool,
    ) -> None:
        import torch

        self.geometry = geometry
        self.num_blocks = num_blocks
        codes_dtype, num_codes, num_scales = row
        heads, size, place = geometry.num_kv_heads, geometry.block_size, device.torch_device
        self._on_card = device.type == "cuda"
        slots = (num_blocks, heads, size) if self._on_card else (heads, num_blocks, size)
        is_turned = self._on_card and geometry.side == "v"
        tile = (*slots[:2], num_codes, size) if is_turned else (*slots, num_codes)
        # Zeroed, so that every page is touched now and memory use does not grow later.
        self._codes = torch.zeros(tile, dtype=getattr(torch, codes_dtype), device=place)
        self._scales = torch.zeros((*slots, num_scales), dtype=geometry.dtype, device=place)
        self.rotation = hadamard(geometry.head_dim, place) if is_rotated else None
        by_token = self._codes.transpose(2, 3) if is_turned else self._codes
        self.codes = by_token.transpose(0, 1) if self._on_card else by_token
        self.scales = self._scales.transpose(0, 1) if self._on_card else self._scales

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``codes`` [B, H, S, C] and ``scales`` [B, H, S, G], views."""
        return {"codes": self.codes.transpose(0, 1), "scales": self.scales.transpose(0, 1)}

    def paged(self) -> PagedSide | None:
        """Codes and scales on CUDA, else None."""
        if not self._on_card:
            return None
        import torch

        geometry = self.geometry
        has_assembly = self._codes.is_cuda and torch.version.cuda is not None
        meta = (geometry.num_kv_heads, geometry.side == "v", self.scales.shape[-1], has_assembly)
        return PagedSide(tensors=(self._codes, self._scales), meta=meta)

    def compiled(self) -> CompiledSide | None:
        """Codes and scales on a CPU, see ``kv_int_compiled``; else None."""
        if self._on_card:
            return None
        from ingle.builtin import kv_int_compiled as made

        tensors = (self.codes, self.scales)
        if self.rotation is None:
            return CompiledSide(tensors=tensors, read=made.read_int8, write=made.write_int8)
        constants = (self.rotation, self.rotation.new_zeros(self.scales.shape[-1]))
        return CompiledSide(
            tensors=tensors, constants=constants, read=made.read_int4, write=made.write_int4
        )

    def put(self, codes: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores ``codes`` [T, H, C] and ``scales`` [T, H, G] at slots (int64 [T])."""
        size = self.geometry.block_size
        for target, rows in ((self.codes, codes), (self.scales, scales)):
            if self._on_card:
                slots = target.permute(1, 2, 0, 3)
                slots[slot_mapping // size, slot_mapping % size] = rows
            else:
                target.flatten(1, 2).index_copy_(1, slot_mapping, rows.transpose(0, 1))


class IntKVCache(KVCacheFormat):
    """What both widths have in common: where codes and scales lie.

    Attributes:
        is_rotated: Whether what is stored has been multiplied by ``hadamard(D)``.
    """

    is_rotated: ClassVar[bool] = False

    def __init__(self) -> None:
        self._buffers = {"k": ReusedBuffer(), "v": ReusedBuffer()}

    @abstractmethod
    def row(self, geometry: KVCacheGeometry) -> tuple[str, int, int]:
        """Of one token and head: torch's name for the type of the codes, a byte each; C; G."""

    @abstractmethod
    def encode(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, H, D]`` as codes [T, H, C] and scales [T, H, G] in ``dtype``."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Codes [H, L, C] and scales [H, L, G] into ``out`` [H, L, D], of the scales' dtype or
        float32."""

    def bytes_per_block(self, geometry: KVCacheGeometry) -> int:
        """Codes and scales of H * S rows."""
        _, num_codes, num_scales = self.row(geometry)
        row_bytes = num_codes + num_scales * geometry.dtype.itemsize
        return geometry.num_kv_heads * geometry.block_size * row_bytes

    def allocate(self, geometry: KVCacheGeometry, num_blocks: int, device: DeviceInfo) -> IntStore:
        """Blocks of zeros."""
        row = self.row(geometry)
        return IntStore(geometry, num_blocks, device, row, is_rotated=self.is_rotated)

    def write(self, store: KVStore, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Encodes ``x [T, H, D]`` into the slots; of one slot's writes the last one counts."""
        ints = _as_int(store)
        if slot_mapping.numel() > 1:
            x = x.index_select(0, last_occurrence(slot_mapping))
        x = x.to(ints.geometry.dtype)
        if ints.rotation is not None:
            x = x.float() @ ints.rotation
        codes, scales = self.encode(x, ints.geometry.dtype)
        ints.put(codes, scales, slot_mapping)

    def gather(self, store: KVStore, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """The first ``seq_len`` tokens: [H, seq_len, D] in the geometry's dtype."""
        turn, dtype = store.rotation, store.geometry.dtype
        if turn is None:
            return self._decoded(store, block_table, seq_len, dtype)
        return (self._decoded(store, block_table, seq_len, turn.dtype) @ turn.T).to(dtype)

    def gather_stored(
        self, store: KVStore, block_table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """The same without turning it back."""
        return self._decoded(store, block_table, seq_len, store.geometry.dtype)

    def _decoded(
        self, store: KVStore, block_table: torch.Tensor, seq_len: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """What is stored of the first ``seq_len`` tokens: [H, seq_len, D] in ``dtype``."""
        ints = _as_int(store)
        geometry = ints.geometry
        table = block_table[: -(-seq_len // geometry.block_size)]
        codes = _tokens(ints.codes, table)[:, :seq_len]
        scales = _tokens(ints.scales, table)[:, :seq_len]
        shape = (geometry.num_kv_heads, seq_len, geometry.head_dim)
        out = self._buffers[geometry.side].take(shape, dtype, codes.device)
        self.decode(codes, scales, out)
        return out


class Int8KVCache(IntKVCache):
    """8 bits and 16 more per token and head: 8.25 bits per value with a head size of 64."""

    name: ClassVar[str] = "int8"
    aliases: ClassVar[tuple[str, ...]] = ("q8", "int8_per_token_head")
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 0.012,
        "float16": 0.012,
        "bfloat16": 0.012,
    }

    @property
    def triton_read(self) -> Callable[..., Any]:
        """See ``kv_int_triton``."""
        from ingle.builtin.kv_int_triton import read_int8

        function: Callable[..., Any] = read_int8
        return function

    @property
    def triton_write(self) -> Callable[..., Any]:
        """See ``kv_int_triton``."""
        from ingle.builtin.kv_int_triton import write_int8

        function: Callable[..., Any] = write_int8
        return function

    def row(self, geometry: KVCacheGeometry) -> tuple[str, int, int]:
        """A byte per value, and one scale."""
        return "int8", geometry.head_dim, 1

    def encode(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounded to nearest even in units of the stored scale."""
        wide = x.float()
        scales = (wide.abs().amax(-1, keepdim=True) / LARGEST_INT8).to(dtype)
        codes = _divided(wide, scales.float()).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
        return codes.char(), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """A code is exact in every activation dtype, so each value is rounded once."""
        out.copy_(codes).mul_(scales)


class Int4KVCache(IntKVCache):
    """4 bits and 16 more per 32 values: 4.5 bits per value.

    Rows are rotated before they are rounded, as exllamav2's Q4 cache does: a few dimensions of keys
    are far larger than the others, and would take all the codes of their group. A byte holds value
    j of the row in its low half and value D/2 + j in its high half.
    """

    name: ClassVar[str] = "int4"
    aliases: ClassVar[tuple[str, ...]] = ("q4",)
    is_rotated: ClassVar[bool] = True
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 0.1,
        "float16": 0.1,
        "bfloat16": 0.1,
    }

    @property
    def triton_read(self) -> Callable[..., Any]:
        """See ``kv_int_triton``."""
        from ingle.builtin.kv_int_triton import read_int4

        function: Callable[..., Any] = read_int4
        return function

    @property
    def triton_write(self) -> Callable[..., Any]:
        """See ``kv_int_triton``."""
        from ingle.builtin.kv_int_triton import write_int4

        function: Callable[..., Any] = write_int4
        return function

    def row(self, geometry: KVCacheGeometry) -> tuple[str, int, int]:
        """Half a byte per value, and a scale per group.

        Raises:
            PluginError: When the head size is odd.
        """
        dim = geometry.head_dim
        if dim % 2:
            raise PluginError(f"an int4 cache needs an even head size, this model's is {dim}.")
        return "uint8", dim // 2, dim // math.gcd(dim, INT4_GROUP)

    def encode(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounded to nearest even in units of the stored scale."""
        import torch

        dim = x.shape[-1]
        size = math.gcd(dim, INT4_GROUP)
        groups = x.float().reshape(*x.shape[:-1], dim // size, size)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = (torch.where(-low > high, low, high) / -8).to(dtype)
        codes = _divided(groups, scales.float()).round_().add_(8).clamp_(0, 15)
        first, second = codes.byte().flatten(-2).chunk(2, -1)
        return first | (second << 4), scales.squeeze(-1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Each half of the bytes is a run of half a row."""
        half = codes.shape[-1]
        out[..., :half].copy_(codes & 15)
        out[..., half:].copy_(codes >> 4)
        groups = out.view(*scales.shape, out.shape[-1] // scales.shape[-1])
        groups.sub_(8).mul_(scales.unsqueeze(-1))


def _divided(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``x / scales``, and zeros where the scale is zero or nothing can be divided."""
    import torch

    return torch.where(scales == 0, 0.0, x / scales).nan_to_num_(0.0)


def _tokens(stored: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Blocks ``table`` of [H, B, S, C] as [H, B' * S, C], in place when they are consecutive."""
    if stored.is_cpu and table.numel():
        first = int(table[0])
        if int(table[-1]) - first == len(table) - 1 and bool((table.diff() == 1).all()):
            return stored.narrow(1, first, len(table)).flatten(1, 2)
    return stored.index_select(1, table).flatten(1, 2)


def _as_int(store: KVStore) -> IntStore:
    if not isinstance(store, IntStore):
        raise PluginError(f"an integer cache format was given a {type(store).__name__}.")
    return store
