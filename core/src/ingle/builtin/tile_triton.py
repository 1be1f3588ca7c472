"""Products with weights of any format on CUDA, from a function that decodes one tile of them.

Shape letters: M rows of activations, N output features as stored, K input features; a program makes
BN outputs of BM rows, BK inputs at a time.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ingle.builtin.split_k_triton import (
    COUNTER_BYTES,
    MAX_TILES,
    finish_split_k,
    split_k_views,
)
from ingle.plugin.linear import TritonDecode

FEW_ROWS = 16
"""Rows of a launch whose programs split the inputs among them: bound by memory."""
MANY_ROWS = 64
TILED_ROWS = 256
"""Up to here a program decodes every tile it multiplies with; beyond, decoding once is cheaper."""
BLOCK_N = 32
BLOCK_K = 64
MOST_REGISTERS = 255
"""A thread's: left to itself the assembler takes 72 for sm_86 and sm_89 and spills."""
MAX_SPLITS = 8
MIN_BLOCKS_PER_SPLIT = 4
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a product is cut up.

    Attributes:
        block_m: BM.
        splits: Programs that share an output tile.
        tiles: Output tiles.
    """

    block_m: int
    splits: int
    tiles: int


def launch_for(rows: int, shape: tuple[int, int]) -> Launch:
    """The launch for ``rows`` rows of a weight [N, K]. A function of these alone, so a captured
    graph and a rerun give the same bits."""
    block_m = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
    tiles = -(-shape[0] // BLOCK_N) * -(-rows // block_m)
    blocks = -(-shape[1] // BLOCK_K)
    splits = min(MAX_SPLITS, blocks // MIN_BLOCKS_PER_SPLIT)
    is_split = rows <= FEW_ROWS and splits > 1 and tiles <= MAX_TILES
    return Launch(block_m=block_m, splits=splits if is_split else 1, tiles=tiles)


def tile_workspace_bytes(decode: TritonDecode, shape: tuple[int, int], max_rows: int) -> int:
    """Scratch for up to ``max_rows`` rows: counters, partial sums of splits, sums of sections."""
    needs = [_needed(decode, shape, rows) for rows in {min(max_rows, FEW_ROWS), max_rows}]
    return max(needs)


def _needed(decode: TritonDecode, shape: tuple[int, int], rows: int) -> int:
    rows = min(rows, TILED_ROWS)
    splits = launch_for(rows, shape).splits
    parts = (splits if splits > 1 else 0) + (len(decode.sections) > 1)
    return COUNTER_BYTES + 4 * rows * shape[0] * parts if parts else 0


@triton.jit
def tile_kernel(
    x, tensors, out, residual, partials, counters, M, K0, K1, X_STRIDE,
    DECODE: tl.constexpr, META: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """``x [M, K]`` times inputs ``K0:K1`` of the weight. Grid: N tiles, M tiles, splits."""
    pn, pm, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rn, rm = pn * BN + tl.arange(0, BN), pm * BM + tl.arange(0, BM)
    # Decoders read what they like: indices past the end repeat the last one.
    n = tl.minimum(rn, N - 1)
    blocks = (K1 - K0 + BK - 1) // BK
    share = (blocks + SPLITS - 1) // SPLITS
    acc = tl.zeros((BN, BM), tl.float32)
    for block in range(split * share, tl.minimum((split + 1) * share, blocks)):
        rk = K0 + block * BK + tl.arange(0, BK)
        weight = DECODE(tensors, n, tl.minimum(rk, K1 - 1), N, K, META, DTYPE)
        inside = (rk < K1)[:, None] & (rm < M)[None, :]
        rows = tl.load(x + rm[None, :] * X_STRIDE + rk[:, None], mask=inside, other=0.0)
        acc = tl.dot(weight, rows, acc, input_precision="ieee")
    tile = pm * tl.num_programs(0) + pn
    finish_split_k(
        acc, out, residual, partials, counters, tile, split, rn, rm, M, N, SPLITS, HAS_RESIDUAL
    )


@triton.jit
def decode_kernel(
    tensors, out, N0, N1, K0, K1, DECODE: tl.constexpr, META: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, DTYPE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Outputs ``N0:N1`` and inputs ``K0:K1`` of the weight into ``out`` [N1 - N0, K]."""
    rn = N0 + tl.program_id(0) * BN + tl.arange(0, BN)
    rk = K0 + tl.program_id(1) * BK + tl.arange(0, BK)
    n, k = tl.minimum(rn, N1 - 1), tl.minimum(rk, K1 - 1)
    weight = DECODE(tensors, n, k, N, K, META, DTYPE)
    inside = (rn < N1)[:, None] & (rk < K1)[None, :]
    tl.store(out + (rn - N0).to(tl.int64)[:, None] * K + rk[None, :], weight, mask=inside)


def multiply_tiles(
    x: torch.Tensor,
    decode: TritonDecode,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """``x [M, K]`` times the weight, plus ``residual`` [M, N], into ``out`` [M, N].

    Args:
        x: Rows one element apart inside, in one of ``DTYPES``.
        decode: The weight.
        out: Contiguous, of x's dtype.
        workspace: uint8, at least ``tile_workspace_bytes``, its counters zero.
        residual: Contiguous, or None.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    launch = launch_for(rows, (outputs, inputs))
    needed = _needed(decode, (outputs, inputs), rows)
    counters = partials = sums = out
    if needed:
        tiles = launch.tiles if launch.splits > 1 else 0
        counters, scratch = split_k_views(workspace, needed, tiles)
        partials = scratch
        sums = scratch[-rows * outputs :]
    last = len(decode.sections) - 1
    for at, (first, stop, meta) in enumerate(decode.sections):
        # Each section adds what came before it; only the last one rounds.
        before = residual if at == 0 else sums
        grid = (-(-outputs // BLOCK_N), -(-rows // launch.block_m), launch.splits)
        tile_kernel[grid](
            x, decode.tensors, out if at == last else sums, before, partials, counters, rows,
            first, stop, x.stride(0), DECODE=decode.fn, META=meta, N=outputs, K=inputs,
            DTYPE=DTYPES[x.dtype], BM=launch.block_m, BN=BLOCK_N, BK=BLOCK_K,
            SPLITS=launch.splits, HAS_RESIDUAL=before is not None, num_warps=4,
            maxnreg=MOST_REGISTERS,
        )  # fmt: skip
    return out


def decode_rows(
    decode: TritonDecode, shape: tuple[int, int], start: int, out: torch.Tensor
) -> torch.Tensor:
    """Outputs from ``start`` on of a weight [N, K], as many as ``out`` [n, K] has rows."""
    stop = start + out.shape[0]
    for first, last, meta in decode.sections:
        grid = (-(-out.shape[0] // BLOCK_N), -(-(last - first) // BLOCK_K))
        decode_kernel[grid](
            decode.tensors, out, start, stop, first, last, DECODE=decode.fn, META=meta,
            N=shape[0], K=shape[1], DTYPE=DTYPES[out.dtype], BN=BLOCK_N, BK=BLOCK_K, num_warps=4,
        )  # fmt: skip
    return out
