"""The Triton kernel of attention over a paged cache, for decode steps and for prompts.

It knows no cache format: it asks the format's ``triton_read`` for tiles, one function for keys and
one for values, so that any pair of formats works. Tiles are [dimension, token].

One program attends for one key/value head of one sequence, for BM rows of it, over one of SPLITS
stretches; its rows are the query heads of that head times the sequence's new tokens, token by
token. The last to arrive merges the stretches, in order. Stretches are computed from ``seq_lens``
on the device, so a captured graph serves any length. What a block holds past the end of its
sequence is never used, whatever it is.

Letters: HQ query heads, HK key/value heads, D head size, DP the next power of two, PAGE tokens in a
block, BM rows and BN tokens of a tile.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bounded(scores, softcap):
    """``softcap * tanh(scores / softcap)``, in units of log2 as ``scores`` are."""
    power = tl.exp2(scores * (2.0 / softcap))
    return softcap * LOG2_E * (1.0 - 2.0 / (power + 1.0))


@triton.jit
def _read_pair(
    k_side, v_side, table, start, stop, head,
    K_READ: tl.constexpr, K_META: tl.constexpr, V_READ: tl.constexpr, V_META: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys and values [DP, BN] of the tokens from ``start`` on, and what each is to be multiplied
    by."""
    rn = tl.arange(0, BN)
    dim = tl.arange(0, DP)[:, None]
    if PAGE % BN == 0:  # tokens past the end are in the same block: one number, no mask
        block = tl.load(table + start // PAGE).to(tl.int64)
        # without the hint the compiler reads transposed values one byte at a time
        tok = (tl.multiple_of(start % PAGE, BN) + rn)[None, :]
    else:  # several blocks, each a number of its own, so that only whole blocks are looked up
        first = start // PAGE
        last = (stop - 1) // PAGE  # tokens past the end are read in the last block
        block = tl.zeros((1, BN), tl.int64)
        for i in tl.static_range(BN // PAGE):
            at = tl.minimum(first + i, last) if MASKED else first + i
            number = tl.load(table + at).to(tl.int64)
            block = tl.where((rn // PAGE == i)[None, :], number, block)
        block = tl.max_constancy(block, [1, PAGE])
        tok = (rn % PAGE)[None, :]
    if D == DP:
        k, k_gain = K_READ(k_side, block, head, tok, dim, None, PAGE, D, K_META, DTYPE)
        v, v_gain = V_READ(v_side, block, head, tok, dim, None, PAGE, D, V_META, DTYPE)
    else:
        k, k_gain = K_READ(k_side, block, head, tok, dim, dim < D, PAGE, D, K_META, DTYPE)
        v, v_gain = V_READ(v_side, block, head, tok, dim, dim < D, PAGE, D, V_META, DTYPE)
    return k, k_gain, v, v_gain


@triton.jit
def _attend_tile(
    acc, peak, total, gain, q, k_side, v_side, table, start, stop, last_visible, head, scale,
    softcap,
    K_READ: tl.constexpr, K_META: tl.constexpr, V_READ: tl.constexpr, V_META: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of online softmax. MASKED: some tokens are past the end or hidden from some row."""
    k, k_gain, v, v_gain = _read_pair(
        k_side, v_side, table, start, stop, head, K_READ, K_META, V_READ, V_META, D, DP, PAGE, BN,
        MASKED, q.dtype,
    )  # fmt: skip
    scores = tl.dot(q, k) * (k_gain * scale)
    if SOFTCAP:
        scores = _bounded(scores, softcap)
    if MASKED:
        token = start + tl.arange(0, BN)
        visible = (token[None, :] <= last_visible[:, None]) & (token < stop)[None, :]
        if WINDOW:
            visible = visible & (token[None, :] > last_visible[:, None] - WINDOW)
        scores = tl.where(visible, scores, -1e30)
        v = tl.where((token < stop)[None, :], v, 0.0).to(q.dtype)  # 0 * NaN is not 0
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    p = tl.exp2(scores - higher[:, None])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), tl.trans(v), acc * shrink[:, None])
    return acc, higher, total, gain * 0.0 + v_gain


@triton.jit
def _merge(
    acc, peak, total, partials, stats, counter, first, split, used, rm, rd, row_ok,
    BM: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Stores one stretch's share; for the program that comes last all shares added in order, for
    the others what they came with, and whether it was the last."""
    at = (first + split) * BM + rm
    tl.store(partials + at[:, None] * DP + rd[None, :], acc, cache_modifier=".cg")
    tl.store(stats + at * 2, peak, cache_modifier=".cg")
    tl.store(stats + at * 2 + 1, total, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's store before the one thread's atomic releases them
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1
    if is_last:
        acc = tl.zeros((BM, DP), tl.float32)
        peak = tl.full((BM,), -1e30, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        for i in tl.range(0, used, loop_unroll_factor=4):
            at = (first + i) * BM + rm
            part_ptr = partials + at[:, None] * DP + rd[None, :]
            part = tl.load(part_ptr, mask=row_ok[:, None], other=0.0, cache_modifier=".cg")
            part_peak = tl.load(stats + at * 2, cache_modifier=".cg")
            higher = tl.maximum(peak, part_peak)
            shrink = tl.exp2(peak - higher)
            grow = tl.exp2(part_peak - higher)
            total = total * shrink + tl.load(stats + at * 2 + 1, cache_modifier=".cg") * grow
            acc = acc * shrink[:, None] + part * grow[:, None]
            peak = higher
        tl.atomic_xchg(counter, 0, sem="relaxed")
    return acc, total, is_last


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention_kernel(
    query, k_side, v_side, block_table, seq_lens, row_starts, new_lens, out, partials, stats,
    counters, softmax_scale, softcap, table_stride,
    K_READ: tl.constexpr, K_META: tl.constexpr, V_READ: tl.constexpr, V_META: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Grid (HK, tiles of rows * SPLITS, sequences); with a split there is one tile of rows.

    partials: fp32 [sequences, HK, SPLITS, BM, DP]. stats: fp32 [sequences, HK, SPLITS, BM, 2]:
    peak, sum.
    """
    head = tl.program_id(0)
    split = tl.program_id(1) % SPLITS
    tile = tl.program_id(1) // SPLITS
    b = tl.program_id(2)
    G: tl.constexpr = HQ // HK
    length = tl.load(seq_lens + b)  # the new tokens included
    first_row = tl.load(row_starts + b)
    new = tl.load(new_lens + b)
    before = length - new  # position of the first new token
    if tile * BM < new * G:
        # what these rows see, together: from low, a multiple of BN, up to end
        first_token = before + tile * BM // G
        end = tl.minimum(before + (tile * BM + BM - 1) // G + 1, length)
        low = 0
        if WINDOW:
            low = tl.maximum(first_token - WINDOW + 1, 0) // BN * BN
        stretch = tl.maximum(tl.cdiv(tl.cdiv(end - low, SPLITS), BN), 1) * BN
        used = tl.maximum(tl.cdiv(end - low, stretch), 1)
        if split < used:
            start = low + split * stretch
            stop = tl.minimum(start + stretch, end)
            rm = tl.arange(0, BM)
            rd = tl.arange(0, DP)
            at = tile * BM + rm
            row = ((first_row + at // G) * HQ + head * G + at % G).to(tl.int64)
            row_ok = at < new * G
            ok = row_ok[:, None] & (rd < D)[None, :]
            q = tl.load(query + row[:, None] * D + rd[None, :], mask=ok, other=0.0)
            last_visible = before + at // G
            scale = softmax_scale * LOG2_E
            table = block_table + b * table_stride
            acc = tl.zeros((BM, DP), tl.float32)
            peak = tl.full((BM,), -1e30, tl.float32)
            total = tl.zeros((BM,), tl.float32)
            gain = 1.0
            # whole tiles that every row sees, then the rest
            whole = 0
            if not WINDOW:
                whole = tl.maximum(tl.minimum(stop, first_token + 1) - start, 0) // BN * BN
                for s in tl.range(start, start + whole, BN, num_stages=STAGES):
                    acc, peak, total, gain = _attend_tile(
                        acc, peak, total, gain, q, k_side, v_side, table, s, stop, last_visible,
                        head, scale, softcap, K_READ, K_META, V_READ, V_META, D, DP, PAGE, BN,
                        WINDOW, SOFTCAP, False,
                    )  # fmt: skip
            for s in tl.range(start + whole, stop, BN, num_stages=STAGES if WINDOW else 1):
                acc, peak, total, gain = _attend_tile(
                    acc, peak, total, gain, q, k_side, v_side, table, s, stop, last_visible,
                    head, scale, softcap, K_READ, K_META, V_READ, V_META, D, DP, PAGE, BN,
                    WINDOW, SOFTCAP, True,
                )  # fmt: skip
            is_last = used == 1
            if SPLITS > 1:  # noqa: SIM102 (counters are no counters without a split)
                if used > 1:
                    place = b * HK + head
                    acc, total, is_last = _merge(
                        acc, peak, total, partials, stats, counters + place, place * SPLITS, split,
                        used, rm, rd, row_ok, BM, DP,
                    )  # fmt: skip
            if is_last:
                acc = acc * (gain / tl.maximum(total, 1e-30))[:, None]
                out_ptr = out + row[:, None] * D + rd[None, :]
                tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=ok)
