"""Codes stored in the order of a GPU kernel's matrix fragments: 4 bits, symmetric.

Both AWQ and GPTQ files may hold it, as the Marlin layout (Frantar et al.) that AutoAWQ 0.2.9 and
AutoGPTQ 0.7.1 write.

Shape letters: N output features, K input features, G groups.
"""

from __future__ import annotations

import torch

from ingle.plugin.affine import AffineWeight
from ingle.plugin.affine_loader import infer_group_size
from ingle.plugin.affine_packing import pack_bits, reorder_runs, unpack_bits

TILE = 16
_RUN = 1024
_PAIR_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GROUPED_SCALES = tuple(i + 8 * j for i in range(8) for j in range(8))
_SINGLE_SCALES = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))


def read_fragments(words: torch.Tensor, scales: torch.Tensor, out_features: int) -> AffineWeight:
    """The affine weight of fragment words (int32 [K/16, 2N]) and scales ([G, N], permuted)."""
    in_features = words.shape[0] * TILE
    stored = unpack_bits(words, 4, words.shape[1] * 8)
    rows = reorder_runs(stored, _inverse(_run_order()))
    tiles = rows.view(in_features // TILE, -1, TILE, TILE)
    codes = tiles.permute(1, 3, 0, 2).reshape(-1, in_features)
    order = _GROUPED_SCALES if scales.shape[0] > 1 else _SINGLE_SCALES
    return AffineWeight(
        bits=4,
        group_size=infer_group_size(in_features, scales.shape[0], None),
        in_features=in_features,
        out_features=out_features,
        codes=pack_bits(codes, 4),
        scales=reorder_runs(scales, _inverse(order)),
    )


def _run_order() -> list[int]:
    """Which value of a run of 1024 (four 16x16 tiles) stands at each place of the stored run.

    Lane i of a warp holds four rows of column i // 4, for two column blocks of 8, of tile j: the
    registers of an ``mma.m16n8k16`` fragment.
    """
    order: list[int] = []
    for lane in range(32):
        column = lane // 4
        first = 2 * (lane % 4)
        rows = (first, first + 1, first + 8, first + 9)
        fragment = [TILE * row + column + 8 * block for block in (0, 1) for row in rows]
        for tile in range(4):
            order.extend(256 * tile + fragment[p] for p in _PAIR_ORDER)
    assert len(order) == _RUN
    return order


def _inverse(order: list[int] | tuple[int, ...]) -> list[int]:
    """The order that undoes ``order``."""
    inverse = [0] * len(order)
    for place, value in enumerate(order):
        inverse[value] = place
    return inverse
