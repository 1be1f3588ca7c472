"""The decoder: one transformer for every family, configured by data.

Shape letters: T tokens, E hidden size, Q query heads, H key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch
from ingle.model.experts import ExpertMLP
from ingle.model.feed_forward import MLP
from ingle.model.layers import ProjectionNorm, RMSNorm
from ingle.model.linear import Linear
from ingle.model.prompt_functions import PromptTurn
from ingle.model.rotary import RotaryTable, rotate
from ingle.plugin.row_counts import padded_rows, with_rows

FEW_ROWS = 64
"""Up to so many rows are no prompt, and are computed as they are."""

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
        """``query`` [T, Q, D] to [T, Q * D]; rows past the batch's last span are no one's, and
        finite if theirs are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How the joined query, key and value projection is cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Projections and norms of one attention layer.

    ``of_prompts``: the rotation in one pass.
    """

    shape: HeadShape
    qkv_proj: Linear
    o_proj: Linear
    backend: AttentionBackend
    q_norm: RMSNorm | ProjectionNorm | None = None
    k_norm: RMSNorm | ProjectionNorm | None = None
    of_prompts: PromptTurn = field(default_factory=PromptTurn)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        turn: Turn | None,
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """``x`` [R, E] (normed) to the block's output [R, E], plus ``residual`` when it is given.

        Without ``turn`` queries and keys stay as they are. Of R rows the first T are the batch's;
        nobody looks at what comes of the others.
        """
        shape, num_tokens = self.shape, batch.slot_mapping.shape[0]
        heads, value = self.heads(x)
        turning = shape.num_heads + shape.num_kv_heads
        writer, query = self.backend.writer, None
        if writer is not None:
            query = writer(heads[:, :turning], value, turn, cache, batch.slot_mapping)
        if query is None:
            turned = heads[:, :turning] if turn is None else self._turned(heads, *turn)
            key = turned[:, shape.num_heads :]
            if x.shape[0] != num_tokens:
                key, value = key[:num_tokens], value[:num_tokens]
            cache.write(key, value, batch.slot_mapping)
            query = turned[:, : shape.num_heads]
        return self.o_proj(self.backend(query, cache, batch), residual)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normed where they are but not yet turned, as the first heads of
        [T, Q + H or more, D], and values [T, H, D], of ``x`` [T, E]."""
        shape = self.shape
        heads = self.qkv_proj(x).view(x.shape[0], -1, shape.head_dim)
        turning = shape.num_heads + shape.num_kv_heads
        value = heads[:, turning:]
        if self.q_norm is None or self.k_norm is None:
            return heads, value
        query = self.q_norm(heads[:, : shape.num_heads])
        key = self.k_norm(heads[:, shape.num_heads : turning])
        return torch.cat((query, key), 1), value

    def _turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The queries and keys of ``heads``, turned: [T, Q + H, D]."""
        turning = self.shape.num_heads + self.shape.num_kv_heads
        found = self.of_prompts(heads, turning, cos, sin)
        return rotate(heads[:, :turning], cos, sin) if found is None else found


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
        pads_prompts: Whether to compute with as many rows as products like, so that they need
            not copy what they are given into more rows.
    """

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: RMSNorm
    lm_head: Linear
    rotaries: tuple[RotaryTable | None, ...]
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    pads_prompts: bool = False

    def hidden_states(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """The last layer's output before the final norm, [T, E]; writes ``caches``."""
        x = look_up(self.embedding, batch.token_ids)
        if self.embedding_multiplier != 1:
            x = x * self.embedding_multiplier
        num_tokens, positions = x.shape[0], batch.positions
        if self.pads_prompts and num_tokens > FEW_ROWS:
            num_rows = padded_rows(num_tokens)
            x = with_rows(x, num_rows)
            positions = torch.nn.functional.pad(positions, (0, num_rows - num_tokens))
        turns = [None if table is None else table.at(positions) for table in self.rotaries]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, turns[layer.rotary], cache, batch)
        return x[:num_tokens]

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
