"""A cache as compiled segments read and write it: in place, cut into pieces.

Shape letters: H key/value heads, B blocks, S tokens in a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.model.segment_shape import SideShape, side_shape

PIECE = 16
"""Tokens that a segment reads at once. Blocks are cut into pieces, so that a short sequence in a
long block costs no more than its length."""

Sides = tuple[SideShape, SideShape]


def cache_sides(caches: Sequence[LayerCache]) -> Sides | None:
    """How all of ``caches`` store keys and values, or None when that differs or is not known to
    segments: then they are given copies."""
    found = {(side_shape(cache.k_store), side_shape(cache.v_store)) for cache in caches}
    keys, values = found.pop()
    return None if found or keys is None or values is None else (keys, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """Tokens in a block of the cache, and how it stores them (None: as they are)."""

    block_size: int
    sides: Sides | None


def piece_size(block_size: int) -> int:
    """Tokens in a piece of a block."""
    return math.gcd(block_size, PIECE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where a layer keeps keys and values, in place and in the pieces that segments read, each
    tensor [H, B, S, ...], then both sides' constants; and the tokens in a block of the cache, a
    multiple of S."""

    tensors: tuple[torch.Tensor, ...]
    piece: int
    block_size: int


def storage_of(cache: LayerCache) -> Storage | None:
    """The layer's storage, or None where one may not write into it."""
    keys, values = cache.k_store.compiled(), cache.v_store.compiled()
    if keys is None or values is None:
        return None
    size = cache.k_store.geometry.block_size
    piece = piece_size(size)
    pieces = (
        tensor.view(tensor.shape[0], -1, piece, *tensor.shape[3:])
        for side in (keys, values)
        for tensor in side.tensors
    )
    tensors = (*pieces, *keys.constants, *values.constants)
    return Storage(tensors=tensors, piece=piece, block_size=size)
