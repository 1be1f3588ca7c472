"""The last layers of a model, whose weights wait in host memory and come over ahead of their use.

Two buffers on the device take turns: while one layer computes from the first, the next one's
weights are copied into the second. A layer always uses the same buffer, so its tensors have the
same addresses in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.errors import CapacityError
from ingle.model.decoder import DecoderLayer, EdgedLayer, SelfAttention, Turn
from ingle.model.device_boundary import DeviceBoundary
from ingle.model.linear import PreparedWeight, find_linears

NUM_SLOTS = 2
ALIGNMENT = 256
"""What kernels may expect of an address: CUDA's own allocations start on multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What is kept in host memory.

    Attributes:
        num_layers: How many layers, the last ones.
        boundary: To the device.
    """

    num_layers: int
    boundary: DeviceBoundary


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies among its layer's bytes."""

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor in uint8 ``data``, a view."""
        values = data[self.start : self.start + self.num_bytes].view(self.dtype)
        return values.as_strided(self.shape, self.stride)


class StoredLayer:
    """The weights of one layer's linears in host memory.

    Args:
        layer: The layer, loaded on the device; its weights are taken from it.
        boundary: To the device.

    Attributes:
        num_bytes: Bytes of them.
        data: uint8 [``num_bytes``], on the host.
    """

    def __init__(self, layer: DecoderLayer | EdgedLayer, boundary: DeviceBoundary) -> None:
        self._linears = list(find_linears(layer))
        held = [dict(part.weight.tensors()) for part in self._parts()]
        # By identity: linears share input orders, and must go on doing so.
        tensors = {id(tensor): tensor for names in held for tensor in names.values()}
        places, self.num_bytes = lay_out(tensors)
        self._places = [{name: places[id(t)] for name, t in names.items()} for names in held]
        device = next(iter(tensors.values())).device
        gathered = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
        for key, tensor in tensors.items():
            places[key].of(gathered).copy_(tensor)
        self.data = boundary.to_host(gathered)
        self.use(self.data)

    def use(self, buffer: torch.Tensor) -> None:
        """From now on the layer computes from uint8 ``buffer``, whatever lies there."""
        views: dict[Place, torch.Tensor] = {}
        places = iter(self._places)
        for linear in self._linears:
            parts = []
            for part in linear.parts:
                held = {n: views.setdefault(p, p.of(buffer)) for n, p in next(places).items()}
                parts.append(replace(part, weight=part.weight.with_tensors(held)))
            linear.parts = tuple(parts)

    def _parts(self) -> Iterator[PreparedWeight]:
        return (part for linear in self._linears for part in linear.parts)


def lay_out(tensors: Mapping[int, torch.Tensor]) -> tuple[dict[int, Place], int]:
    """Places for ``tensors`` one after another, and the bytes they take together.

    Raises:
        CapacityError: When one is not laid out in memory as torch's tensors usually are.
    """
    places: dict[int, Place] = {}
    end = 0
    for key, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_mkldnn:
            raise CapacityError(
                "a kernel keeps its weights in a layout of its own that cannot be streamed: load "
                "without --offload-layers and --cpu-offload-gb."
            )
        start = -(-end // ALIGNMENT) * ALIGNMENT
        dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        places[key] = Place(start, tuple(tensor.shape), dense.stride(), tensor.dtype)
        end = start + places[key].num_bytes
    return places, end


class LayerStream:
    """Brings layers over in their turn.

    Args:
        boundary: To the device.
    """

    def __init__(self, boundary: DeviceBoundary) -> None:
        self._boundary = boundary
        self._stored: list[StoredLayer] = []
        self._buffers: list[torch.Tensor] = []
        self._inside: dict[int, int] = {}

    @property
    def host_bytes(self) -> int:
        """Bytes of all layers in host memory."""
        return sum(stored.num_bytes for stored in self._stored)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(buffer.numel() for buffer in self._buffers)

    def add(self, layer: DecoderLayer | EdgedLayer) -> StreamedLayer:
        """The next layer, its weights in host memory from now on."""
        self._stored.append(StoredLayer(layer, self._boundary))
        return StreamedLayer(layer=layer, stream=self, number=len(self._stored) - 1)

    def open(self) -> None:
        """Makes the buffers, once every layer has been added."""
        sizes = [stored.num_bytes for stored in self._stored]
        for slot in range(min(NUM_SLOTS, len(sizes))):
            self._buffers.append(self._boundary.buffer(max(sizes[slot::NUM_SLOTS])))
        for number, stored in enumerate(self._stored):
            stored.use(self._buffers[number % NUM_SLOTS])

    def enter(self, number: int) -> None:
        """Layer ``number`` computes next: its weights and the next layer's come over."""
        self._fetch(number)
        if number + 1 < len(self._stored):
            self._fetch(number + 1)
        self._boundary.wait(number % NUM_SLOTS)

    def leave(self, number: int) -> None:
        """Layer ``number`` has computed: its buffer is for the layer after the next, and at the end
        for the first ones of the next step."""
        self._boundary.done(number % NUM_SLOTS)
        following = number + NUM_SLOTS
        self._fetch(following if following < len(self._stored) else number % NUM_SLOTS)

    def _fetch(self, number: int) -> None:
        slot = number % NUM_SLOTS
        if self._inside.get(slot) != number:
            self._inside[slot] = number
            data = self._stored[number].data
            self._boundary.start(slot, data, self._buffers[slot][: data.numel()])


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedLayer:
    """A layer whose weights come over before it computes.

    Attributes:
        layer: The layer itself.
        stream: Brings them.
        number: The layer's place in the stream.
    """

    layer: DecoderLayer | EdgedLayer
    stream: LayerStream
    number: int

    @property
    def rotary(self) -> int:
        """As the layer's own."""
        return self.layer.rotary

    @property
    def attention(self) -> SelfAttention:
        """The layer's own."""
        return self.layer.attention

    def __call__(
        self, x: torch.Tensor, turn: Turn | None, cache: LayerCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """``x`` [T, E] to [T, E]."""
        self.stream.enter(self.number)
        x = self.layer(x, turn, cache, batch)
        self.stream.leave(self.number)
        return x
