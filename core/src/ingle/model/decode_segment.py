"""One decode step of a layer as a plain function, for torch's compiler.

Everything between two attentions is one function: the rest of a layer after its attention, and
the next layer up to its own. Compiled ahead of time it is one C++ kernel that streams the weights
once; run eagerly it is some thirty operator calls, each of which finds its code evicted from the
processor's caches by the weights in between.

Shape letters: E hidden size, I intermediate size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Attention's output [Q*D] in the activation dtype; residual float32 [E]; cosines and signed sines
[D], the token's row of ``RotaryTable``."""
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""o_proj [E, Q*D], post-attention norm [E], gate_up_proj [2*I, E], down_proj [E, I]; then of the
next layer: input norm [E], qkv_proj [(Q + 2*H) * D, E]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """What a compiled segment is specialised on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def qkv_size(self) -> int:
        """Outputs of the joined query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class DecodeSegment(torch.nn.Module):
    """The function; a module only because ``torch.export`` wants one."""

    def __init__(self, shape: SegmentShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, state: State, weights: Weights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From one attention's output to the next one's input, for one token.

        Args:
            state: See ``State``.
            weights: See ``Weights``.

        Returns:
            The residual float32 [E]; turned queries and keys [Q + H, D] and values [H, D] in the
            activation dtype.
        """
        shape = self.shape
        attended, residual, cos, sin = state
        o_proj, post_norm, gate_up_proj, down_proj, input_norm, qkv_proj = weights
        x = residual + _product(o_proj, attended.float())
        both = _product(gate_up_proj, self._norm(x, post_norm))
        gate, up = both[: shape.intermediate_size], both[shape.intermediate_size :]
        x = x + _product(down_proj, torch.nn.functional.silu(gate) * up)
        heads = _product(qkv_proj, self._norm(x, input_norm)).view(-1, shape.head_dim)
        turning = shape.num_heads + shape.num_kv_heads
        turned, half = heads[:turning], shape.head_dim // 2
        swapped = torch.cat((turned[:, half:], turned[:, :half]), 1)
        turned = turned * cos.float() + swapped * sin.float()
        return x, turned.to(attended.dtype), heads[turning:].to(attended.dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean() + self.shape.eps) * weight.float()


STREAMS = 4
"""Places a product reads its weight from at once. One stream leaves a core waiting for memory at
every page border: 11.9 against 15 GB/s on two cores of a Xeon (docs/benchmarks.md)."""


def _product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``weight`` [N, K] times float32 [K], summed in float32."""
    if weight.shape[0] % STREAMS:
        return (weight.float() * x).sum(-1)
    parts = weight.view(STREAMS, -1, weight.shape[1])
    return torch.cat([(part.float() * x).sum(-1) for part in parts])


def example_inputs(shape: SegmentShape, dtype: torch.dtype) -> tuple[State, Weights]:
    """Small random inputs of the right shapes, the same ones every time."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.05).to(dtype)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    attended = shape.num_heads * shape.head_dim
    state = (draw(attended), draw(hidden).float(), draw(shape.head_dim), draw(shape.head_dim))
    weights = (
        draw(hidden, attended),
        draw(hidden) + 1,
        draw(2 * inner, hidden),
        draw(hidden, inner),
        draw(hidden) + 1,
        draw(shape.qkv_size, hidden),
    )
    return state, weights
