"""One kernel that rotates queries and keys and puts keys and values where they belong, encoded.

Between the projection and attention each number is read once and written once: the rotation stays
in registers, the format's ``triton_write`` encodes, and the slot mapping says where to.

Letters: T rows, Q query heads, H key/value heads, D head size, DP the power of two from it on.
"""

# Triton kernels take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ingle.attention.layer_cache import LayerCache
from ingle.plugin.kv_cache import KVCacheFormat, KVStore, PagedSide


@triton.jit
def _row(base, dim, D: tl.constexpr):
    """float32 [DP, 1] of D numbers."""
    return tl.load(base + dim, mask=dim < D, other=0.0).to(tl.float32)


@triton.jit
def rotate_and_write_kernel(
    qk, value, cos, sin, slots, query_out, k_side, v_side, qk_stride, value_stride,
    K_WRITE: tl.constexpr, K_META: tl.constexpr, V_WRITE: tl.constexpr, V_META: tl.constexpr,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Grid (T, Q + H): a program is one head of one row; heads from Q on are keys and values.

    qk: [T, Q + H, D] and value: [T, H, D], rows apart by strides. cos, sin: [T, D], sin signed as
    ``RotaryTable`` has it. query_out: [T, Q, D].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DP)[:, None]
    HALF: tl.constexpr = D // 2
    base = qk + row * qk_stride + head * D
    x = _row(base, dim, D)
    if TURNS:
        other = tl.where(dim < HALF, dim + HALF, dim - HALF)
        swapped = tl.load(base + other, mask=dim < D, other=0.0).to(tl.float32)
        # the first product is rounded, and then the sum, as ``model.rotary`` rounds them
        kind = qk.dtype.element_ty
        turned = (x * _row(cos + row * D, dim, D)).to(kind).to(tl.float32)
        turned += swapped * _row(sin + row * D, dim, D)
        x = turned.to(kind).to(tl.float32)
    if head < Q:
        place = query_out + (row * Q + head) * D + dim
        tl.store(place, x.to(query_out.dtype.element_ty), mask=dim < D)
    else:
        slot = tl.load(slots + row)
        block = slot // PAGE
        tok = (slot % PAGE).to(tl.int32) + tl.zeros((1, 1), tl.int32)
        kv_head = head - Q
        stored = (dim < D) & (block != 0)  # block 0 is nobody's: rows without a sequence go there
        K_WRITE(k_side, block, kv_head, tok, dim, x, stored, PAGE, D, K_META)
        v = _row(value + row * value_stride + kv_head * D, dim, D)
        V_WRITE(v_side, block, kv_head, tok, dim, v, stored, PAGE, D, V_META)


def _target(form: KVCacheFormat, store: KVStore) -> tuple[PagedSide, Any] | None:
    side, write = store.paged(), form.triton_write
    if side is None or write is None or not (store.rotation is None or side.write_turns):
        return None
    return side, write


def _meta(side: PagedSide) -> tuple[Any, ...]:
    return side.meta if side.write_meta is None else side.write_meta


def rotate_and_write(
    turning: torch.Tensor,
    value: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor | None:
    """Rotated queries [T, Q, D], keys and values being stored; None when a side cannot be written
    so, and then nothing has been done.

    Args:
        turning: Queries and keys [T, Q + H, D], each row contiguous.
        value: [T, H, D], the same.
        turn: Cosines and signed sines [T, 1, R]; None leaves queries and keys as they are, and
            nothing is done where R is not D.
        slot_mapping: int64 [T], no slot twice but of the null block, which stays as it is.
    """
    k, v = _target(cache.k_format, cache.k_store), _target(cache.v_format, cache.v_store)
    num_rows, num_heads, dim = turning.shape
    if k is None or v is None or turning.stride(1) != dim or value.stride(1) != dim:
        return None
    if turn is not None and turn[0].shape[-1] != dim:
        return None
    geometry = cache.k_store.geometry
    heads = geometry.num_kv_heads
    query = turning.new_empty(num_rows, num_heads - heads, dim)
    cos, sin = (turning, turning) if turn is None else (part.contiguous() for part in turn)
    rotate_and_write_kernel[(num_rows, num_heads)](
        turning, value, cos, sin, slot_mapping, query, k[0].tensors, v[0].tensors,
        turning.stride(0), value.stride(0), K_WRITE=k[1], K_META=_meta(k[0]), V_WRITE=v[1],
        V_META=_meta(v[0]), Q=num_heads - heads, H=heads, D=dim,
        DP=max(16, 1 << (dim - 1).bit_length()), PAGE=geometry.block_size, TURNS=turn is not None,
        num_warps=1 if dim <= 64 else 2,
    )  # fmt: skip
    return query
