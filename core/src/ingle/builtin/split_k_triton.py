"""Split-K: several programs share one output tile along K; the last to arrive adds them up.

Every program stores its fp32 partial sums, then raises the tile's counter. The one that sees the
counter full reads all partials *in index order*, adds the residual and stores the result, and puts
the counter back to zero. So the result does not depend on who came last, nothing has to be zeroed
between launches, and a captured CUDA graph can be replayed for ever.

Shape letters: M rows of activations, N output features, S splits along K.

Workspace (uint8, zeroed once by whoever owns it, shared by any number of launches on one stream):

    0 ............. COUNTER_BYTES   int32 counters, one per output tile; zero between launches
    COUNTER_BYTES . end             fp32 partials [S, M, N]

The counters sit in a region of fixed size so that linears of different N can share a workspace
without one's partial sums landing on another's counters.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

COUNTER_BYTES = 1 << 16
MAX_TILES = COUNTER_BYTES // 4
MOST_AT_ONCE = tl.constexpr(8192)
"""Partial sums that a program of one warp reads before it adds them: more do not fit registers."""


def split_k_workspace_bytes(rows: int, out_features: int, splits: int) -> int:
    """Bytes of workspace that ``splits`` partial results of ``rows x out_features`` need."""
    return COUNTER_BYTES + 4 * rows * out_features * splits if splits > 1 else 0


def split_k_views(
    workspace: torch.Tensor | None, needed: int, tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace as (int32 counters, fp32 partials).

    Args:
        workspace: uint8, 1-D, contiguous, its counter region zero.
        needed: What ``split_k_workspace_bytes`` gave.
        tiles: Output tiles of the launch, one counter each.
    """
    if workspace is None or workspace.dtype != torch.uint8 or not workspace.is_contiguous():
        got = "None" if workspace is None else f"{workspace.dtype} {tuple(workspace.shape)}"
        raise ValueError(
            f"split-K needs a contiguous uint8 workspace, got {got}: pass {needed} zeroed bytes"
        )
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace has {workspace.numel()} bytes, this product needs {needed}: "
            "size it with split_k_workspace_bytes for the largest row count"
        )
    if tiles > MAX_TILES:
        raise ValueError(
            f"{tiles} output tiles, at most {MAX_TILES} have a counter: use a larger block_n "
            "or a single split"
        )
    counters = workspace[:COUNTER_BYTES].view(torch.int32)
    return counters, workspace[COUNTER_BYTES:needed].view(torch.float32)


@triton.jit
def _add_residual_and_store(acc, out, residual, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    if HAS_RESIDUAL:
        acc += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def finish_split_k(
    acc, out, residual, partials, counters, tile, split, rn, rm, M,
    N: tl.constexpr, SPLITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores one program's share; the last program of the tile stores the result.

    acc: fp32 [BN, BM], features by rows. out, residual: [M, N], contiguous; they may be the same
    tensor, since each element is read and written by one thread. rn, rm: int32 [BN], [BM].
    """
    mask = (rn < N)[:, None] & (rm < M)[None, :]
    offsets = rm[None, :] * N + rn[:, None]
    if SPLITS == 1:
        _add_residual_and_store(acc, out, residual, offsets, mask, HAS_RESIDUAL)
    else:
        # .cg: partials live in L2, the only cache all programs share
        tl.store(partials + split * M * N + offsets, acc, mask=mask, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's store before the one thread's atomic releases them
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros_like(acc)
            ONE: tl.constexpr = rn.shape[0] * rm.shape[0]
            if SPLITS * ONE <= MOST_AT_ONCE:
                for i in tl.static_range(SPLITS):
                    part = partials + i * M * N + offsets
                    total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            else:
                for i in tl.range(0, SPLITS, loop_unroll_factor=MOST_AT_ONCE // ONE):
                    part = partials + i * M * N + offsets
                    total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            _add_residual_and_store(total, out, residual, offsets, mask, HAS_RESIDUAL)
            tl.atomic_xchg(counters + tile, 0, sem="relaxed")
