"""The fp8 cache: one byte per number, and per layer and side one scale, or one per head.

``stored = round(x / scale)`` and ``x ~ stored * scale``.

Where scales are measured, keys are multiplied by ``hadamard(D)`` first, and queries by the same: a
number of a few bits is off by a share of itself, so what a few large dimensions lose decides a
logit, the more as those of queries are large too. Spread over all dimensions the same loss counts
for less. Scales that were read are for keys as they are, and those are stored so.

Letters: T tokens, H key/value heads, D head size, B blocks, S tokens in a block.

Layout on a CPU: uint8 [H, B, S, D]. The head is outermost, so consecutive blocks of one head are
one run of memory and decoding a sequence reads H runs. On CUDA: keys [B, H, S, D], values
[B, H, D, S], as core's decode attention reads them; the same view [H, B, S, D] serves all else.
Sizes are told without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ingle.plugin import (
    CheckpointInfo,
    CompiledSide,
    Detection,
    DeviceInfo,
    KVCacheFormat,
    KVCacheGeometry,
    KVStore,
    PagedSide,
    PluginError,
    TensorReader,
    hadamard,
)
from ingle_kv_fp8.codec import E4M3, E5M2, Codec
from ingle_kv_fp8.request import fp8_request
from ingle_kv_fp8.scales import read_scales

if TYPE_CHECKING:
    import torch

HARDWARE_FP8 = (8, 9)
"""Compute capability from which a card converts e4m3."""
TRIED_SCALES = 16
"""Scales of an octave that measuring chooses from."""
LARGEST_TURNED = 1e30
"""Keys are cut to this before they are turned: a sum with infinity would be NaN."""


class Fp8Store(KVStore):
    """One side of one layer.

    Attributes:
        codes: uint8 [H, B, S, D], the storage or a view of it.
        blocks: The storage where it lies as core's decode attention wants it, else None.
        head_scale: float32 [H], the same scales.
        scale: float32 [1, 1, 1] or [H, 1, 1].
        has_unit_scale: Whether the scale is 1, so that it need not be applied.
        has_checkpoint_scale: Whether the scale was read; measuring leaves it alone.
        rotation: ``hadamard(D)`` for keys whose scale was measured, else None.
        is_written: Whether anything has been stored; from then on the scale is frozen.
    """

    def __init__(
        self, geometry: KVCacheGeometry, num_blocks: int, device: DeviceInfo, codec: Codec
    ) -> None:
        import torch

        self._codec = codec

        self.geometry = geometry
        self.num_blocks = num_blocks
        self.blocks: torch.Tensor | None = None
        heads, tile = geometry.num_kv_heads, (geometry.block_size, geometry.head_dim)
        # Zeroed, so that every page is touched now and memory use does not grow later.
        if device.type == "cuda":
            tile = tile if geometry.side == "k" else tile[::-1]
            self.blocks = torch.zeros(
                (num_blocks, heads, *tile), dtype=torch.uint8, device=device.torch_device
            )
            by_token = self.blocks if geometry.side == "k" else self.blocks.transpose(2, 3)
            self.codes = by_token.transpose(0, 1)
        else:
            self.codes = torch.zeros(
                (heads, num_blocks, *tile), dtype=torch.uint8, device=device.torch_device
            )
        self.scale = torch.ones(1, 1, 1, device=self.codes.device)
        self.head_scale = torch.ones(heads, device=self.codes.device)
        self.has_unit_scale = True
        self.has_checkpoint_scale = False
        self.is_written = False
        self._has_fp8 = (device.capability or (0, 0)) >= HARDWARE_FP8
        self._has_assembly = self.codes.is_cuda and torch.version.cuda is not None

    def paged(self) -> PagedSide | None:
        """Codes and scales per head on CUDA, see ``triton_io``; else None."""
        if self.blocks is None:
            return None
        is_value = self.geometry.side == "v"
        meta = (self.geometry.num_kv_heads, is_value, self._has_fp8, self._has_assembly)
        return PagedSide(
            tensors=(self.blocks, self.head_scale),
            meta=meta,
            write_meta=(*meta, self.rotation is not None),
            write_turns=True,
        )

    def compiled(self) -> CompiledSide | None:
        """Codes and scales per head on a CPU, see ``compiled``; else None."""
        if self.blocks is not None:
            return None
        import torch

        from ingle_kv_fp8 import compiled

        codes = self.codes.view(getattr(torch, self._codec.dtype_name))
        is_e4m3 = codes.dtype is torch.float8_e4m3fn
        scale = self.head_scale[:, None]
        if self.rotation is None:
            constants: tuple[torch.Tensor, ...] = (scale,)
            write = compiled.write_e4m3 if is_e4m3 else compiled.write_e5m2
        else:
            constants = (self.rotation, scale)
            write = compiled.write_turned_e4m3 if is_e4m3 else compiled.write_turned_e5m2
        return CompiledSide(tensors=(codes,), constants=constants, read=compiled.read, write=write)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``codes``: uint8 [B, H, S, D], a view."""
        return {"codes": self.codes.transpose(0, 1)}

    def put(self, codes: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores uint8 ``codes [H, T, D]`` at slots (int64 [T])."""
        if self.blocks is None:
            self.codes.flatten(1, 2).index_copy_(1, slot_mapping, codes)
            return
        size = self.geometry.block_size
        slots = self.codes.permute(1, 2, 0, 3)
        slots[slot_mapping // size, slot_mapping % size] = codes.transpose(0, 1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, H, D]`` as it is to be stored, but for the scale: in float32 where it is turned.

        What is too large for the sums is cut off, infinity included; NaN stays.
        """
        if self.rotation is None:
            return x
        return x.float().clamp(-LARGEST_TURNED, LARGEST_TURNED) @ self.rotation

    def set_scale(self, scale: torch.Tensor) -> None:
        """Takes ``scale`` [1] or [H]. Raises ``PluginError`` once something has been stored."""
        if self.is_written:
            raise PluginError(
                "the scale of an fp8 cache cannot change once it holds keys or values; "
                "load or measure scales before the first write."
            )
        self.scale = scale.to(self.codes.device, self.scale.dtype).view(-1, 1, 1)
        self.has_unit_scale = bool((self.scale == 1).all())
        self.head_scale = self.scale.view(-1).expand(self.codes.shape[0]).contiguous()


class Fp8Format(KVCacheFormat):
    """What both types have in common; the subclass names the codec.

    Attributes:
        codec: How a number becomes a byte.
    """

    codec: ClassVar[Codec]

    def __init__(self) -> None:
        self._rotations: dict[tuple[int, str], torch.Tensor] = {}

    def bytes_per_block(self, geometry: KVCacheGeometry) -> int:
        """One byte per number; scales belong to the layer, not to a block."""
        return geometry.num_kv_heads * geometry.block_size * geometry.head_dim

    def allocate(self, geometry: KVCacheGeometry, num_blocks: int, device: DeviceInfo) -> Fp8Store:
        """Blocks with scale 1; a slot holds nothing of meaning before it is written."""
        return Fp8Store(geometry, num_blocks, device, self.codec)

    def load_scales(self, store: KVStore, layer_name: str, reader: TensorReader) -> bool:
        """Takes the scale of this layer and side, by whichever name it has.

        Raises:
            CheckpointError: Naming the tensor when it holds anything but positive scales.
        """
        fp8 = _as_fp8(store)
        scales = read_scales(layer_name, fp8.geometry, reader)
        if scales is None:
            return False
        fp8.set_scale(scales)
        fp8.has_checkpoint_scale = True
        return True

    def observe(self, store: KVStore, x: torch.Tensor) -> None:
        """Turns keys from now on, and sets one scale per head: of those with which the largest of
        ``x [T, H, D]`` is between a half and a quarter of the largest code, the one that rounds
        ``x`` best. The rest of the range is for what has not been seen.

        Where a number stands between two powers of two decides how well it is rounded, so an
        octave of scales is all there is to choose from. Infinity and NaN are left out; a head
        without any number but zero keeps scale 1. Scales from the checkpoint win.
        """
        import torch

        fp8 = _as_fp8(store)
        if fp8.has_checkpoint_scale or x.shape[0] == 0:
            return
        if fp8.geometry.side == "k" and not fp8.is_written:
            fp8.rotation = self._rotation(fp8.geometry.head_dim, str(fp8.codes.device))
        finite = fp8.turned(torch.where(x.isfinite(), x.float(), 0.0))
        largest = finite.abs().amax((0, 2))
        # on a grid, so that the last bits of a number decide nothing
        least_scale = torch.log2(largest.clamp_min(1e-30) / (self.codec.largest / 2))
        on_grid = torch.exp2((least_scale * TRIED_SCALES).ceil() / TRIED_SCALES)
        first = torch.where(largest > 0, on_grid, 1.0)
        best = first
        least = torch.full_like(first, float("inf"))
        for step in range(TRIED_SCALES):
            scale = first * 2.0 ** (step / TRIED_SCALES)
            by_head = scale.view(1, -1, 1)
            rounded = self.codec.decode(self.codec.encode(finite / by_head)).float() * by_head
            error = (rounded - finite).square().sum((0, 2))
            best = torch.where((error < least) & (largest > 0), scale, best)
            least = torch.minimum(error, least)
        fp8.set_scale(best)

    def _rotation(self, dim: int, device: str) -> torch.Tensor:
        """``hadamard(dim)``, one for all layers, so that it stays in a processor's cache."""
        key = dim, device
        if key not in self._rotations:
            self._rotations[key] = hadamard(dim, device)
        return self._rotations[key]

    def write(self, store: KVStore, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Encodes ``x [T, H, D]`` into the slots; of one slot's writes the last one counts."""
        fp8 = _as_fp8(store)
        fp8.is_written = True
        x = fp8.turned(x)
        if not fp8.has_unit_scale:
            x = x.float() / fp8.scale.view(1, -1, 1)
        codes = self.codec.encode(x).transpose(0, 1)
        if slot_mapping.numel() > 1:
            codes = codes.index_select(1, last_writes(slot_mapping))
        fp8.put(codes, slot_mapping)

    def gather(self, store: KVStore, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """The first ``seq_len`` tokens: [H, seq_len, D] in the geometry's dtype."""
        turn, dtype = _as_fp8(store).rotation, _as_fp8(store).geometry.dtype
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
        fp8 = _as_fp8(store)
        num_blocks = -(-seq_len // fp8.geometry.block_size)
        blocks = _take_blocks(fp8.codes, block_table[:num_blocks])
        values = self.codec.decode(blocks.flatten(1, 2)[:, :seq_len])
        if fp8.has_unit_scale:
            return _from_half(values, dtype)
        return values.float().mul_(fp8.scale).to(dtype)


class Fp8E4M3Format(Fp8Format):
    """e4m3: 3 bits of mantissa, largest value 448 times the scale."""

    name: ClassVar[str] = "fp8_e4m3"
    aliases: ClassVar[tuple[str, ...]] = ("fp8", "fp8_e4m3fn")
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 0.03,
        "float16": 0.03,
        "bfloat16": 0.03,
    }
    codec: ClassVar[Codec] = E4M3()

    @property
    def triton_read(self) -> Callable[..., Any]:
        """See ``triton_io``."""
        from ingle_kv_fp8.triton_io import read_e4m3

        return read_e4m3

    @property
    def triton_write(self) -> Callable[..., Any]:
        """See ``triton_io``."""
        from ingle_kv_fp8.triton_io import write_e4m3

        return write_e4m3

    def detect(self, info: CheckpointInfo) -> Detection | None:
        """Claims checkpoints whose config asks for an fp8 cache; all of them mean e4m3."""
        reason = fp8_request(info)
        return None if reason is None else Detection(reason=reason, priority=10)


class Fp8E5M2Format(Fp8Format):
    """e5m2: 2 bits of mantissa, range of float16; needs no scale."""

    name: ClassVar[str] = "fp8_e5m2"
    aliases: ClassVar[tuple[str, ...]] = ()
    max_relative_error: ClassVar[Mapping[str, float]] = {
        "float32": 0.06,
        "float16": 0.06,
        "bfloat16": 0.06,
    }
    codec: ClassVar[Codec] = E5M2()

    @property
    def triton_read(self) -> Callable[..., Any]:
        """See ``triton_io``."""
        from ingle_kv_fp8.triton_io import read_e5m2

        return read_e5m2

    @property
    def triton_write(self) -> Callable[..., Any]:
        """See ``triton_io``."""
        from ingle_kv_fp8.triton_io import write_e5m2

        return write_e5m2


def last_writes(slots: torch.Tensor) -> torch.Tensor:
    """For each entry of ``slots`` (int64 [T]) the last position that names the same slot.

    Every write to a slot then carries the same bytes, so their order does not matter. Sorted and
    searched without branching on data: safe inside a CUDA graph.
    """
    import torch

    ordered, positions = torch.sort(slots, stable=True)
    ends = torch.searchsorted(ordered, slots, right=True) - 1
    return positions.index_select(0, ends)


def _take_blocks(codes: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Blocks ``block_table`` of [H, B, S, D]: [H, B', S, D], in place when they are consecutive."""
    if codes.is_cpu and block_table.numel():
        numbers: Sequence[int] = block_table.tolist()
        first = numbers[0]
        if list(numbers) == list(range(first, first + len(numbers))):
            return codes[:, first : first + len(numbers)]
    return codes.index_select(1, block_table)


def _from_half(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` float16 as ``dtype``. By way of float32: torch converts float16 straight to
    bfloat16 one by one on a CPU."""
    return values if values.dtype is dtype else values.float().to(dtype)


def _as_fp8(store: Any) -> Fp8Store:
    if not isinstance(store, Fp8Store):
        raise PluginError(f"an fp8 cache format was given a {type(store).__name__}.")
    return store
