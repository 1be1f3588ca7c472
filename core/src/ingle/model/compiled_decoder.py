"""A decoder whose single-token steps run through compiled segments; all else as before.

Shape letters: E hidden size, Q query heads, H key/value heads, D head size, B blocks, S tokens in
a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan, int_tensor
from ingle.model.decode_segment import MIN_LENGTH
from ingle.model.decoder import Decoder, DecoderLayer
from ingle.model.rotary import RotaryTable
from ingle.model.segment_cache import Storage, piece_size, storage_of
from ingle.model.segment_package import CompiledSegment, flat, place
from ingle.model.segment_plan import SegmentShapes, SegmentWeights, known_layers, window_of

NULL_BLOCK = 0
"""Block 0 belongs to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """``SegmentShapes``, compiled."""

    entry: CompiledSegment
    layers: CompiledSegment
    last: CompiledSegment
    head: CompiledSegment


class CompiledDecoder:
    """``model`` with a faster path for a batch of one token.

    Args:
        model: The decoder; ``shapes`` are its ``segment_shapes``.
        shapes: What ``segments`` were compiled for.
        segments: Loaded and found right on this machine.
        weights: ``segment_weights(model)``.
        in_place: Whether ``segments`` read the cache as it is stored, not copies.
    """

    def __init__(
        self,
        model: Decoder,
        shapes: SegmentShapes,
        segments: Segments,
        weights: SegmentWeights,
        *,
        in_place: bool = True,
    ) -> None:
        table = model.rotaries[0]
        assert table is not None
        self._model = model
        self._segments = segments
        self._layers = known_layers(model)
        self._rotary: RotaryTable = table
        self._weights = weights
        self._in_place = in_place
        self._runs = _runs(len(self._layers), len(shapes.layers.layers))
        self._run_weights = [flat(weights.layers[run]) for run in self._runs]
        self._storages: list[_RunStorage | None] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.logits``."""
        if hidden.shape[0] != 1:
            return self._model.logits(hidden)
        (logits,) = self._segments.head([hidden[0], *self._weights.head])
        return self._model.bounded(logits.unsqueeze(0))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.normed``."""
        return self._model.normed(hidden)

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """As ``Decoder.hidden_states``; one token goes through the compiled segments."""
        if batch.token_ids.shape[0] != 1 or batch.spans[0].seq_len < MIN_LENGTH:
            return self._model.hidden_states(batch, caches)
        return self._one_token(batch, caches)

    def _one_token(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        x = self._model.embedding[batch.token_ids]
        cos, sin = (part.view(-1) for part in self._rotary.at(batch.positions))
        residual, turned, value = self._segments.entry([x[0], cos, sin, *self._weights.entry])
        segment, last = self._segments.layers, len(self._runs) - 1
        places = _Places(batch.spans[0])
        if not self._storages:
            self._storages = [self._storage(run, caches) for run in self._runs]
        for number, storage in enumerate(self._storages):
            if storage is None:
                at = self._runs[number].start
                layer = self._layers[at]
                key = turned[layer.attention.shape.num_heads :]
                stored, where = _copies(layer, caches[at], batch, key, value)
            else:
                stored, where = storage.tensors, places.of(storage)
            weights = self._run_weights[number]
            inputs = [turned, value, residual, cos, sin, *stored, *where, *weights]
            if number < last:
                residual, turned, value = segment(inputs)
        (out,) = self._segments.last(inputs)
        # A copy: the package writes its next result into the same memory.
        return out.unsqueeze(0).clone()

    def _storage(self, run: slice, caches: Sequence[LayerCache]) -> _RunStorage | None:
        """What the layers of ``run`` keep, None when a segment is given a copy."""
        found = [storage_of(cache) if self._in_place else None for cache in caches[run]]
        known = [storage for storage in found if storage is not None]
        if len(known) < len(found):
            return None
        tensors = [tensor for storage in known for tensor in storage.tensors]
        return _RunStorage(
            tensors=tensors, form=known[0], window=window_of(self._layers[run.start])
        )


def _runs(num_layers: int, at_once: int) -> list[slice]:
    """The layers of every call: ``at_once`` each, what is left in the last one, which has some."""
    starts = list(range(0, num_layers, at_once))
    return [slice(start, min(start + at_once, num_layers)) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunStorage:
    """Where the layers of a call keep keys and values, one after the other, and what is the same
    for all of them."""

    tensors: list[torch.Tensor]
    form: Storage
    window: int | None


Where = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A segment's ``Place``."""


class _Places:
    """Where a step's sequence lies in the layers' own storage."""

    def __init__(self, span: SequenceSpan) -> None:
        self._span = span
        self._bywindow_of: dict[int | None, Where] = {}

    def of(self, storage: _RunStorage) -> Where:
        """The place in ``storage``."""
        window = storage.window
        if window not in self._bywindow_of:
            self._bywindow_of[window] = self._place(_skipped(window, self._span), storage.form)
        return self._bywindow_of[window]

    def _place(self, skipped: int, storage: Storage) -> Where:
        length, size = self._span.seq_len, storage.piece
        per_block = storage.block_size // size
        blocks = self._span.block_table[: -(-length // storage.block_size)]
        pieces = [block * per_block + at for block in blocks for at in range(per_block)]
        used, start = pieces[skipped // size : -(-length // size)], skipped % size
        if len(used) < MIN_LENGTH:
            used, start = [NULL_BLOCK, *used], start + size
        return (int_tensor(used), *place(start, length - skipped))


def _copies(
    layer: DecoderLayer,
    cache: LayerCache,
    batch: ForwardBatch,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[list[torch.Tensor], Where]:
    """Copies of what the cache gives to read, the token's own ``key`` and ``value`` [H, D] having
    been stored before, and where the sequence lies in them."""
    span = batch.spans[0]
    cache.write(key.unsqueeze(0), value.unsqueeze(0), batch.slot_mapping)
    skipped = _skipped(window_of(layer), span)
    length, size = span.seq_len - skipped, piece_size(cache.k_store.geometry.block_size)
    start = size if length <= size else 0
    keys, values = (_in_blocks(side[:, skipped:], start, size) for side in cache.read(span))
    return [keys, values], (torch.arange(keys.shape[1]), *place(start, length))


def _in_blocks(side: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """``side`` [H, L, D] as [H, B, S, D], contiguous, from place ``start`` on."""
    padded = torch.nn.functional.pad(side, (0, 0, start, -side.shape[1] % size))
    return padded.contiguous().view(side.shape[0], -1, size, side.shape[2])


def _skipped(window: int | None, span: SequenceSpan) -> int:
    """Tokens at the start of a sequence that a window no longer reaches."""
    return 0 if window is None else max(0, span.seq_len - window)
