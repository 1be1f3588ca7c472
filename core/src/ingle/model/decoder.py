"""The decoder: one transformer for every family, configured by data.

Shape letters: T tokens, E hidden size, Q query heads, H key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.model.experts import ExpertMLP
from ingle.model.feed_forward import MLP
from ingle.model.layers import ProjectionNorm, RMSNorm
from ingle.model.linear import Linear
from ingle.model.rotary import RotaryTable, rotate

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a step's positions, as ``RotaryTable.at`` gives them."""


Writer = Callable[
    [torch.Tensor, torch.Tensor, Turn | None, LayerCache, torch.Tensor], torch.Tensor | None
]
"""Rotates queries and keys [T, Q + H, D] and stores keys and values [T, H, D] at slots [T], all at
once; gives the queries [T, Q, D], or None when it has done nothing."""


class AttentionBackend(Protocol):
    """Attention over a paged cache; chosen once per device."""

    name: str

    @property
    def writer(self) -> Writer | None:
        """A faster way to fill the cache, or None."""
        ...

    def __call__(self, query: torch.Tensor, cache: LayerCache, batch: ForwardBatch) -> torch.Tensor:
        """``query`` [T, Q, D] to [T, Q * D]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How the joined query, key and value projection is cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Projections and norms of one attention layer."""

    shape: HeadShape
    qkv_proj: Linear
    o_proj: Linear
    backend: AttentionBackend
    q_norm: RMSNorm | ProjectionNorm | None = None
    k_norm: RMSNorm | ProjectionNorm | None = None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        turn: Turn | None,
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """``x`` [T, E] (normed) to the block's output [T, E], plus ``residual`` when it is given.

        Without ``turn`` queries and keys stay as they are.
        """
        shape = self.shape
        turned, value = self.heads(x)
        writer, query = self.backend.writer, None
        if writer is not None:
            query = writer(turned, value, turn, cache, batch.slot_mapping)
        if query is None:
            if turn is not None:
                turned = rotate(turned, *turn)
            cache.write(turned[:, shape.num_heads :], value, batch.slot_mapping)
            query = turned[:, : shape.num_heads]
        return self.o_proj(self.backend(query, cache, batch), residual)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, Q + H, D], normed where they are but not yet turned, and values
        [T, H, D] of ``x`` [T, E]."""
        shape = self.shape
        heads = self.qkv_proj(x).view(x.shape[0], -1, shape.head_dim)
        turning = shape.num_heads + shape.num_kv_heads
        value = heads[:, turning:]
        if self.q_norm is None or self.k_norm is None:
            return heads[:, :turning], value
        query = self.q_norm(heads[:, : shape.num_heads])
        key = self.k_norm(heads[:, shape.num_heads : turning])
        return torch.cat((query, key), 1), value


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One block: attention and feed-forward, each normed before and added to the residual.

    ``rotary`` is the layer's place in the decoder's ``rotaries``.
    """

    input_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    mlp: MLP | ExpertMLP
    rotary: int = 0

    def __call__(
        self, x: torch.Tensor, turn: Turn | None, cache: LayerCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """``x`` [T, E] to [T, E]."""
        x = self.attention(self.input_norm(x), x, turn, cache, batch)
        return self.mlp(self.post_attention_norm(x), x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What happens around one block of a layer: a norm before it, a norm and a factor after it."""

    input_norm: RMSNorm | None
    output_norm: RMSNorm | None
    multiplier: float

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The block's input for the residual ``x`` [T, E]."""
        return x if self.input_norm is None else self.input_norm(x)

    def leave(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The residual ``x`` [T, E] with the block's output ``out`` [T, E] added."""
        if self.output_norm is not None:
            out = self.output_norm(out)
        return x + (out if self.multiplier == 1 else out * self.multiplier)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgedLayer:
    """One block whose outputs are normed or scaled before they join the residual."""

    attention: SelfAttention
    around_attention: Edge
    mlp: MLP | ExpertMLP
    around_mlp: Edge
    rotary: int = 0

    def __call__(
        self, x: torch.Tensor, turn: Turn | None, cache: LayerCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """``x`` [T, E] to [T, E]."""
        attended = self.attention(self.around_attention.enter(x), None, turn, cache, batch)
        x = self.around_attention.leave(attended, x)
        return self.around_mlp.leave(self.mlp(self.around_mlp.enter(x)), x)


class Layer(Protocol):
    """What a decoder needs of a layer."""

    @property
    def rotary(self) -> int:
        """The layer's place in the decoder's ``rotaries``."""
        ...

    @property
    def attention(self) -> SelfAttention:
        """Its attention."""
        ...

    def __call__(
        self, x: torch.Tensor, turn: Turn | None, cache: LayerCache, batch: ForwardBatch
    ) -> torch.Tensor:
        """``x`` [T, E] to [T, E]."""
        ...


class Model(Protocol):
    """What the runner needs of a model."""

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The last layer's output before the final norm, [T, E]; writes ``caches``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] of the rows that need logits to float32 [R, V]."""
        ...

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] after the final norm, as embeddings are made of."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The whole model. Everything it needs for a step comes as an argument.

    Attributes:
        embedding: [V, E]; may stay in host memory when the rest is on a card.
        layers: In order.
        norm: Before the output head.
        lm_head: [E] to [V].
        rotaries: The rotary tables that layers share; None for layers that do not rotate.
        embedding_multiplier: Factor on the embeddings.
        logits_divisor: What logits are divided by.
        logits_softcap: Bound of the logits, or None.
    """

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: RMSNorm
    lm_head: Linear
    rotaries: tuple[RotaryTable | None, ...]
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The last layer's output before the final norm, [T, E]; writes ``caches``."""
        x = look_up(self.embedding, batch.token_ids)
        if self.embedding_multiplier != 1:
            x = x * self.embedding_multiplier
        turns = [None if table is None else table.at(batch.positions) for table in self.rotaries]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, turns[layer.rotary], cache, batch)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] of the rows that need logits to float32 [R, V]."""
        return self.bounded(self.lm_head(self.norm(hidden)).float())

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] after the final norm, as embeddings are made of."""
        return self.norm(hidden)

    def bounded(self, logits: torch.Tensor) -> torch.Tensor:
        """The output head's ``logits`` float32 [R, V], divided and bounded as the model wants."""
        if self.logits_divisor != 1:
            logits = logits / self.logits_divisor
        if self.logits_softcap is not None:
            logits = torch.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits


def look_up(embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``embedding`` [V, E] for ``token_ids`` [T], read where the table is: [T, E] on the
    tokens' device."""
    return embedding[token_ids.to(embedding.device)].to(token_ids.device)
