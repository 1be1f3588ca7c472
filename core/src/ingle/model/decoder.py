"""The decoder: one transformer for the whole Llama family, configured by data.

Shape letters: T tokens, E hidden size, Q query heads, H key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.model.layers import RMSNorm
from ingle.model.linear import Linear
from ingle.model.rotary import RotaryTable, rotate


class AttentionBackend(Protocol):
    """Attention over a paged cache; chosen once per device."""

    name: str

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
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """``x`` [T, E] (normed) to ``residual`` [T, E] plus the layer's output."""
        shape = self.shape
        rows = x.shape[0]
        heads = self.qkv_proj(x).view(rows, -1, shape.head_dim)
        turning = shape.num_heads + shape.num_kv_heads
        value = heads[:, turning:]
        if self.q_norm is None or self.k_norm is None:
            turned = rotate(heads[:, :turning], *turn)
        else:
            query = self.q_norm(heads[:, : shape.num_heads])
            key = self.k_norm(heads[:, shape.num_heads : turning])
            turned = rotate(torch.cat((query, key), 1), *turn)
        cache.write(turned[:, shape.num_heads :], value, batch.slot_mapping)
        attended = self.backend(turned[:, : shape.num_heads], cache, batch)
        return self.o_proj(attended, residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Gated feed-forward: ``down(act(gate(x)) * up(x))``."""

    gate_up_proj: Linear
    down_proj: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``x`` [T, E] (normed) to ``residual`` [T, E] plus the block's output."""
        gate, up = self.gate_up_proj(x).chunk(2, 1)
        return self.down_proj(self.activation(gate) * up, residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One block: attention and feed-forward, each normed before and added to the residual."""

    input_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    mlp: MLP

    def __call__(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """``x`` [T, E] to [T, E]."""
        x = self.attention(self.input_norm(x), x, turn, cache, batch)
        return self.mlp(self.post_attention_norm(x), x)


class Model(Protocol):
    """What the runner needs of a model."""

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The last layer's output before the final norm, [T, E]; writes ``caches``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] of the rows that need logits to float32 [R, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The whole model. Everything it needs for a step comes as an argument.

    Attributes:
        embedding: [V, E]; may stay in host memory when the rest is on a card.
    """

    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear
    rotary: RotaryTable

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The last layer's output before the final norm, [T, E]; writes ``caches``."""
        x = look_up(self.embedding, batch.token_ids)
        turn = self.rotary.at(batch.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, turn, cache, batch)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [R, E] of the rows that need logits to float32 [R, V]."""
        return self.lm_head(self.norm(hidden)).float()


def look_up(embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``embedding`` [V, E] for ``token_ids`` [T], read where the table is: [T, E] on the
    tokens' device."""
    return embedding[token_ids.to(embedding.device)].to(token_ids.device)
