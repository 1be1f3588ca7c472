"""A 4-bit affine weight in the Triton kernel's order, as a weight that core can hold.

Shape letters: N output features as stored, K input features, C = chunks of 128 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from ingle.builtin.affine_triton import CHUNK, PackedW4, W4Config, dequantize_w4, pack_w4
from ingle.plugin import AffineWeight, LinearWeight

PACK_ELEMENTS = 1 << 24
"""Codes packed at a time: int32 copies of more would not fit beside a model on a small card."""
ROW_MULTIPLE = 64
"""Rows packed at a time are a multiple of what the packer pads to, so parts join unpadded."""
TILE = 16
"""Output features of a row tile of ``PackedW4.words``."""


@dataclass(kw_only=True, eq=False)
class W4CudaWeight(LinearWeight):
    """One layout for every row count.

    Attributes:
        packed: Codes, scales and zeros in the kernel's order.
        config: How few rows are launched.
        in_features: K.
        out_features: Logical output features.
        stored_out_features: N.
        input_order: As for every weight.
        input_scale: As for every weight.
    """

    packed: PackedW4
    config: W4Config
    in_features: int
    out_features: int
    stored_out_features: int
    input_order: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K] in the original input order, equal to the bit to the loaded weight's."""
        weight = dequantize_w4(self.packed)
        if self.input_order is not None:
            ordered, weight = weight, torch.empty_like(weight)
            weight[:, self.input_order] = ordered
        if self.input_scale is not None:
            weight *= self.input_scale.to(torch.float32)
        return weight

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """``words``, ``scales`` and, where there are any, ``zeros``, order and scale of inputs."""
        held = {
            "words": self.packed.words,
            "scales": self.packed.scales,
            "zeros": self.packed.zeros,
            "input_order": self.input_order,
            "input_scale": self.input_scale,
        }
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A copy around other tensors of the same names."""
        inner = {n: t for n, t in tensors.items() if n in ("words", "scales", "zeros")}
        outer: dict[str, Any] = {n: t for n, t in tensors.items() if n not in inner}
        packed: Any = inner
        return replace(self, packed=replace(self.packed, **packed), **outer)


def pack_affine(weight: AffineWeight) -> PackedW4:
    """The weight in the kernel's order, packed a few rows at a time."""
    parts = [_pack_rows(weight, rows) for rows in _row_chunks(weight)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        words=torch.cat([part.words for part in parts]),
        scales=torch.cat([part.scales for part in parts], 1),
        zeros=torch.cat(zeros, 1) if zeros else None,
        out_features=weight.stored_out_features,
    )


def _row_chunks(weight: AffineWeight) -> list[slice]:
    step = max(1, PACK_ELEMENTS // (weight.in_features * ROW_MULTIPLE)) * ROW_MULTIPLE
    stop = weight.stored_out_features
    return [slice(start, min(start + step, stop)) for start in range(0, stop, step)]


def _pack_rows(weight: AffineWeight, rows: slice) -> PackedW4:
    codes = weight.unpacked_codes(rows.start, rows.stop)
    zeros = None if weight.zeros is None else weight.zeros[:, rows]
    return pack_w4(codes, weight.scales[:, rows], zeros, weight.group_size)


def decode_tiles(packed: PackedW4, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Output features ``16 * start : 16 * stop`` as a matrix [16 * (stop - start), K] in ``dtype``.

    Padding of N included, of K cut off. Each weight is rounded once, from float32. The four codes
    of a word are done one after another, straight into place: few passes over memory.
    """
    tiles, chunks = stop - start, packed.words.shape[1]
    # tile, chunk, kt, g, t, k8, row8, k1
    words = packed.words[start:stop].view(tiles, chunks, 2, 8, 4, 2, 2, 2)
    matrix = torch.empty(tiles * TILE, chunks * CHUNK, dtype=dtype, device=words.device)
    # tile, row8, g, chunk, j, t, kt, k8, k1 -> j, then as the words
    target = matrix.view(tiles, 2, 8, chunks, 4, 4, 2, 2, 2).permute(4, 0, 3, 6, 2, 5, 7, 1, 8)
    for j in range(4):
        codes = (words >> (4 * j)).bitwise_and_(15)
        groups = torch.arange(32 * j, chunks * CHUNK, CHUNK, device=words.device)
        groups = groups // packed.group_size
        zeros: torch.Tensor | int = 8
        if packed.zeros is not None:
            zeros = _spread(packed.zeros, groups, start, stop)
        scales = _spread(packed.scales, groups, start, stop).to(torch.float32)
        torch.mul(codes - zeros, scales, out=target[j])
    return matrix[:, : packed.in_features]


def _spread(table: torch.Tensor, groups: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Per-group numbers [G, N'] of some tiles, to stand beside their words: broadcastable to
    [tiles, C, kt, g, t, k8, row8, k1]. ``groups``: int64 [C]."""
    chosen = table[:, start * TILE : stop * TILE].index_select(0, groups)
    by_row = chosen.view(groups.shape[0], stop - start, 2, 8).permute(1, 0, 3, 2)
    return by_row[:, :, None, :, None, None, :, None]
