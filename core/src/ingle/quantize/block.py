"""One decoder block, or the output head, as it is lent to a quantizer.

Shape letters: T tokens, L tokens of a row, E hidden size, N output features, K input features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from ingle.attention.metadata import ForwardBatch
from ingle.checkpoint.model_config import ModelConfig
from ingle.errors import CheckpointError
from ingle.model.build import build_layer, build_norm, build_rotaries
from ingle.model.decoder import DecoderLayer, EdgedLayer, Turn
from ingle.model.layers import RMSNorm
from ingle.plugin.checkpoint import TensorReader
from ingle.plugin.device import DeviceInfo
from ingle.plugin.quantizer import BlockPart, LinearSite
from ingle.quantize.block_weights import Store, StoreSource, Watch, WatchedLinear, read_block
from ingle.quantize.row_attention import RowAttention, RowCache
from ingle.quantize.site_map import describe_sites, head_site

TOKENS_AT_ONCE: Final = 2048
"""Rows that go through a block together have so many tokens at most, or are one row."""
HEAD: Final = "lm_head"
EMBEDDING: Final = "model.embed_tokens.weight"

SeeSite = Callable[[LinearSite, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What all blocks of a run have in common.

    Attributes:
        config: The model.
        device: Where blocks are computed.
        row_length: L; 0 without calibration.
    """

    config: ModelConfig
    device: DeviceInfo
    row_length: int


class _SeenEnough(Exception):
    """Ends a forward pass whose rest nobody needs."""


class LentBlock(ABC):
    """What a block and the head have in common; see ``ingle.plugin.QuantizerBlock``.

    Attributes:
        hidden: The calibration rows as they enter the block: float32 [T, E] on the CPU, or None.
        outputs: What the block made of ``hidden`` when it was last observed, or None.
    """

    def __init__(self, name: str, index: int, shape: BlockShape, store: Store) -> None:
        self.name = name
        self.index = index
        self.num_blocks = shape.config.num_layers
        self.row_length = shape.row_length
        self.sites: tuple[LinearSite, ...] = ()
        self.hidden: torch.Tensor | None = None
        self.outputs: torch.Tensor | None = None
        self._shape = shape
        self._store = store
        self._watch = Watch()

    def weight(self, name: str) -> torch.Tensor:
        """The weight of linear ``name``: float32 [N, K]."""
        return self._store[f"{name}.weight"]

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        """Lets the block compute with ``weight``."""
        self._replace(f"{name}.weight", weight)

    def tensor(self, name: str) -> torch.Tensor | None:
        """A norm or a bias by its checkpoint name, or None."""
        return self._store.get(name)

    def set_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces a norm or a bias."""
        self._replace(name, tensor)
        self._rebuild()

    def tensors(self) -> Store:
        """Every tensor the block computes with."""
        return dict(self._store)

    def observe(self, see: SeeSite, last: LinearSite | None = None) -> None:
        """Runs all calibration rows through the block, or up to ``last`` of its sites; ``outputs``
        are kept when it ran to the end."""
        by_names = {site.names: site for site in self.sites}

        def told(names: tuple[str, ...], x: torch.Tensor) -> None:
            see(by_names[names], x)
            if last is not None and names == last.names:
                raise _SeenEnough

        self._watch.see = told
        try:
            if last is None:
                self.outputs = self.compute()
            else:
                self._compute_some()
        finally:
            self._watch.see = None

    def _compute_some(self) -> None:
        """The block as far as the watch lets it run, for every chunk."""
        with torch.inference_mode():
            for x in self._chunks():
                with suppress(_SeenEnough):
                    self._forward(x)

    def compute(self) -> torch.Tensor:
        """The block's outputs for ``hidden``, as it is now: float32 [T, E] on the CPU."""
        with torch.inference_mode():
            return torch.cat([self._forward(x).cpu() for x in self._chunks()])

    @abstractmethod
    def run_part(self, part: BlockPart, x: torch.Tensor) -> torch.Tensor:
        """The output of a part for its first site's input ``x`` [T, E]."""

    def _chunks(self) -> Iterator[torch.Tensor]:
        """The calibration rows, whole ones, as many as go together."""
        assert self.hidden is not None, "this quantizer said that it is not calibrated"
        rows = max(1, TOKENS_AT_ONCE // self.row_length)
        for part in torch.split(self.hidden, rows * self.row_length):
            yield part.to(self._shape.device.torch_device)

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        held = self._store[name]
        if tensor.shape != held.shape:
            raise CheckpointError(
                f"{name}: a quantizer gave {list(tensor.shape)} in place of {list(held.shape)}."
            )
        self._store[name] = tensor.to(held)

    @abstractmethod
    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E] through the block."""

    @abstractmethod
    def _rebuild(self) -> None:
        """Builds the block anew, over the tensors it has now."""


class LayerBlock(LentBlock):
    """One decoder layer."""

    def __init__(self, reader: TensorReader, index: int, shape: BlockShape) -> None:
        name = f"model.layers.{index}"
        store = read_block(reader, f"{name}.", torch.device(shape.device.torch_device))
        super().__init__(name, index, shape, store)
        self._rebuild()

    def run_part(self, part: BlockPart, x: torch.Tensor) -> torch.Tensor:
        """The output of a part for its first site's input ``x`` [T, E]."""
        with torch.inference_mode():
            if part == "attention":
                batch = _batch(len(x), self.row_length, x.device)
                return self._layer.attention(x, None, self._turn(batch), RowCache(), batch)
            return self._layer.mlp(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = _batch(len(x), self.row_length, x.device)
        return self._layer(x, self._turn(batch), RowCache(), batch)

    def _turn(self, batch: ForwardBatch) -> Turn | None:
        table = self._rotaries[self._layer.rotary]
        return None if table is None else table.at(batch.positions)

    def _rebuild(self) -> None:
        config, length = self._shape.config, max(1, self.row_length)
        source = StoreSource(self._store, self._watch, self._shape.device)
        windowed = config.layer_types[self.index] == "sliding_attention"
        attention = RowAttention(
            length,
            config.scales.attention_scale,
            config.sliding_window if windowed else None,
            config.scales.attention_softcap,
        )
        self._layer: DecoderLayer | EdgedLayer = build_layer(config, source, attention, self.index)
        self._rotaries = build_rotaries(config, source, length)
        self.sites = describe_sites(config, self.name, source.sites)


class HeadBlock(LentBlock):
    """The output head behind the last norm. Its outputs, one row of logits for every token, are
    never kept."""

    def __init__(self, reader: TensorReader, shape: BlockShape) -> None:
        config = shape.config
        device = torch.device(shape.device.torch_device)
        self.tied = f"{HEAD}.weight" not in reader.names(HEAD)
        stored = EMBEDDING if self.tied else f"{HEAD}.weight"
        store = {
            f"{HEAD}.weight": reader.get(stored).to(device=device, dtype=torch.float32),
            **read_block(reader, "model.norm.", device),
            **read_block(reader, f"{HEAD}.bias", device),
        }
        super().__init__(HEAD, config.num_layers, shape, store)
        self.sites = (head_site(HEAD, config.norm_offset),)
        self._rebuild()

    def observe(self, see: SeeSite, last: LinearSite | None = None) -> None:
        """Shows what enters the head; the product itself is not needed."""
        with torch.inference_mode():
            for x in self._chunks():
                see(self.sites[0], self._norm(x))

    def run_part(self, part: BlockPart, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E], normed, to [T, N]: what logits are before they are scaled."""
        with torch.inference_mode():
            return self._linear(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._norm(x))

    def _rebuild(self) -> None:
        config = self._shape.config
        source = StoreSource(self._store, self._watch, self._shape.device)
        self._norm: RMSNorm = build_norm(config, source, "model.norm", config.hidden_size)
        self._linear = WatchedLinear(self._store, (HEAD,), self._watch)


def _batch(num_tokens: int, row_length: int, device: torch.device) -> ForwardBatch:
    """Rows of equal length, each from position 0 on. Slots mean nothing here."""
    positions = torch.arange(row_length, device=device).repeat(num_tokens // row_length)
    return ForwardBatch(token_ids=positions, positions=positions, slot_mapping=positions, spans=())
