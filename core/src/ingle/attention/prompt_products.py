"""A prompt's attention in bfloat16 as two plain products and a compiled softmax between them.

torch's flash kernel for CPUs multiplies tile by tile with a BLAS; oneDNN's whole products are up to
twice as fast on a processor without a matrix unit (measured in docs/benchmarks.md). Everything is
float32 until the output is rounded; the flash kernel rounds the weights as well.

Shape letters: T rows, H key/value heads, G query heads of each, L keys, D head size.
"""

from __future__ import annotations

import torch

from ingle.plugin.compiled_function import Compilable, CompiledFunction

TILE_ROWS = 256
"""Rows that look at the same keys; what a causal tile computes in vain is half of them."""
TILE_LOGITS = 1 << 21
"""Logits at a time: 8 MiB, which stay in the cache."""
ROWS_STEP = 32
"""Row counts of tiles are multiples of it, and lengths of keys of twice that: oneDNN makes a
program for every shape."""
KEYS_STEP = 64
MAX_KEYS = 2048
"""The flash kernel is as fast from twice as many on: the logits go through memory here."""

Pair = tuple[torch.Tensor, torch.Tensor]


def weights_of(
    logits: torch.Tensor,
    last: torch.Tensor,
    scale: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Softmax over the keys that a row sees.

    Args:
        logits: float32 [T, L].
        last: int32 [T], the last key of each row.
        scale: float32 [1], a factor on the logits.
        lse: Takes the log-sum-exps (natural), float32 [T].
        weights: Takes the weights, float32 [T, L]; zero where a row does not look.
    """
    keys = torch.arange(logits.shape[1], dtype=torch.int32)
    seen = torch.where(keys <= last[:, None], logits * scale, -torch.inf)
    highest = seen.amax(1, keepdim=True)
    powers = torch.exp(seen - highest)
    total = powers.sum(1, keepdim=True)
    lse.copy_((highest + torch.log(total)).squeeze(1))
    weights.copy_(powers / total)


WEIGHTS = Compilable(
    name=f"{__name__}:WEIGHTS",
    function=weights_of,
    arguments=(
        (("rows", "keys"), torch.float32),
        (("rows",), torch.int32),
        ((1,), torch.float32),
        (("rows",), torch.float32),
        (("rows", "keys"), torch.float32),
    ),
    usual={"rows": 768, "keys": 512},
    max_relative_error=2.0**-16,  # exponentials of another library
)


class PromptProducts:
    """The attention.

    Args:
        scale: Factor on the logits.

    Attributes:
        function: The softmax; the products pay from when it is compiled.
    """

    def __init__(self, scale: float) -> None:
        self.function = CompiledFunction(WEIGHTS)
        self._scale = torch.tensor([scale], dtype=torch.float32)

    def serves(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether ``query`` [H, G, T, D] over ``key`` [H, G, L, D] is faster this way."""
        is_long = query.shape[2] >= ROWS_STEP and key.shape[2] >= KEYS_STEP
        is_known = key.shape[2] % KEYS_STEP == 0 and key.shape[2] <= MAX_KEYS
        is_half = query.dtype is torch.bfloat16
        return self.function.is_compiled and is_half and is_long and is_known

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
    ) -> Pair:
        """``query`` [H, G, T, D] over ``key`` and ``value`` [H, G, L, D], alike over G: the output
        [H, G, T, D], in memory as [T, H, G, D], and log-sum-exps [H, G, T].

        ``causal``: row t sees keys up to t; else every row sees all.
        """
        heads, groups, rows, size = query.shape
        out = query.new_empty(rows, heads, groups, size)
        lse = torch.empty(heads, groups, rows, dtype=torch.float32)
        single = query.float()
        limits = torch.arange(rows, dtype=torch.int32)
        if not causal:
            limits.fill_(key.shape[2])
        for head in range(heads):
            keys, values = key[head, 0].float(), value[head, 0].float().T.contiguous()
            for start, stop in _tiles(rows, groups, key.shape[2]):
                seen = min(-(-stop // KEYS_STEP) * KEYS_STEP, key.shape[2]) if causal else None
                tile = single[head, :, start:stop].reshape(-1, size)
                last = limits[start:stop].repeat(groups)
                found, sums = self._tile(tile, keys[:seen], values[:, :seen], last)
                by_head = found.view(groups, stop - start, size)
                out[start:stop, head] = by_head.transpose(0, 1)
                lse[head, :, start:stop] = sums.view(groups, -1)
        return out.permute(1, 2, 0, 3), lse

    def _tile(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, last: torch.Tensor
    ) -> Pair:
        logits = _product(rows, keys)
        lse, weights = torch.empty(rows.shape[0]), torch.empty_like(logits)
        self.function(logits, last, self._scale, lse, weights)
        return _product(weights, values.contiguous()), lse


def _product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``rows`` [T, K] times the transpose of ``matrix`` [N, K], by oneDNN, where ``@`` is MKL's."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, None, "none", [], "")
    return found


def _tiles(rows: int, groups: int, keys: int) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each tile."""
    most = TILE_LOGITS // (groups * keys) // ROWS_STEP * ROWS_STEP
    step = max(ROWS_STEP, min(TILE_ROWS, most))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
