"""4-bit affine weights laid out for CPUs: one layout for torch's int4 product and for decoding.

Nibbles lie in blocks of B outputs, B = 64 with AVX-512 and 32 with AVX2: ``codes`` is uint8
[N'/B, K, B/2], and in block n and row k the low nibble of byte i is output ``n * B + i``, the high
one output ``n * B + B/2 + i``. It is what ``_convert_weight_to_int4pack_for_cpu`` makes of whole
blocks, and both halves of a block are contiguous runs, so decoding one is a mask or a shift. N is
padded to N', whole blocks, with zeros.

Shape letters: N output features, N' the same padded, K input features, G groups, B block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F

from ingle.builtin import nibble_words
from ingle.plugin import AffineWeight, RowProduct
from ingle.plugin.compiled_function import MIN_SIZE
from ingle.plugin.nibble_tiles import block_size

INT4_GROUP_SIZES = (256, 128, 64, 32)
"""Groups that torch's int4 product takes, the largest first."""
WORD_RUN = 16
"""Inputs that lie in one group where codes become words: what several rows take at a time."""


@dataclass(kw_only=True, eq=False, repr=False)
class PlanarWeight(AffineWeight):
    """An affine weight of 4 bits whose ``codes`` are uint8 [N'/B, K, B/2].

    Attributes:
        int4_scales: bfloat16 [K / int4_group_size, N', 2] for torch's int4 product, or None:
            ``w = (q - 8) * s + o`` with the scale and offset of each group.
        int4_group_size: Inputs that share a row of it; 0 when there is none.
        lane_scales: None, or scales as ``nibble_words`` has them, [NB, G', L]: then ``codes`` hold
            words and not planes. G' is 2 where G is 1, else G.
        lane_zeros: Zeros or offsets as ``nibble_words`` has them, or None.
    """

    int4_scales: torch.Tensor | None = None
    int4_group_size: int = 0
    lane_scales: torch.Tensor | None = None
    lane_zeros: torch.Tensor | None = None

    tensor_fields: ClassVar[tuple[str, ...]] = (
        *AffineWeight.tensor_fields,
        "int4_scales",
        "lane_scales",
        "lane_zeros",
    )

    @property
    def block_size(self) -> int:
        """B."""
        return 2 * self.codes.shape[2]

    @property
    def word_groups(self) -> int:
        """G', or 0 where outputs, groups or inputs are not whole words, or nothing multiplies
        several rows by them."""
        if self.int4_scales is None:
            return 0
        groups = max(MIN_SIZE, self.num_groups)
        is_whole = self.stored_out_features % self.block_size == 0 and self.has_equal_groups
        return groups if is_whole and self.in_features % (groups * WORD_RUN) == 0 else 0

    def word_codes(self) -> torch.Tensor:
        """int32 [NB, G', K / (8 G'), L]; there are ``lane_scales``."""
        return nibble_words.as_words(self.codes, self.word_groups)

    def lane_tables(self) -> list[torch.Tensor]:
        """Scales and zeros or offsets as ``nibble_words`` has them."""
        if self.lane_scales is not None:
            return [t for t in (self.lane_scales, self.lane_zeros) if t is not None]
        tables = [t for t in (self.scales, self.zeros, self.offsets) if t is not None]
        shape = (self.word_groups, self.stored_out_features)
        return [nibble_words.lane_table(t.expand(shape)) for t in tables]

    def use_words(self) -> None:
        """Writes words over the planes, for good."""
        if self.lane_scales is None:
            self.lane_scales, *zeros = self.lane_tables()
            self.lane_zeros = zeros[0] if zeros else None
            nibble_words.rewrite(self.codes)

    def _codes_shape(self) -> tuple[int, ...]:
        blocks = -(-self.stored_out_features // self.block_size)
        return (blocks, self.in_features, self.block_size // 2)

    def unpacked_codes(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Codes of output rows ``start:stop``: uint8 [rows, K], in kernel order."""
        stop = self.stored_out_features if stop is None else stop
        first = start // self.block_size
        codes = self._nibbles(first, -(-stop // self.block_size), torch.uint8)
        skipped = first * self.block_size
        return codes[:, start - skipped : stop - skipped].T

    def _nibbles(self, first: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Codes of blocks ``first:stop``, one row per input: [K, blocks * B]."""
        codes = self.codes[first:stop]
        if self.lane_scales is not None:
            codes = nibble_words.words_to_planar(codes)
        pairs = codes.transpose(0, 1)
        out = torch.empty((*pairs.shape[:2], 2, pairs.shape[2]), dtype=dtype, device=pairs.device)
        out[:, :, 0] = pairs & 15
        out[:, :, 1] = pairs >> 4
        return out.flatten(1)

    def decode_blocks(self, first: int, stop: int) -> torch.Tensor:
        """Outputs of blocks ``first:stop`` as kernels see them, transposed: float32 [K, n].

        n stops at N. The same values as ``decode_rows``, whose layout suits products less.
        """
        columns = slice(first * self.block_size, min(stop * self.block_size, self.scales.shape[1]))
        codes = self._nibbles(first, stop, torch.float32)[:, : columns.stop - columns.start]
        grouped = self._grouped(codes)
        scales = self._grouped_table(self.scales[:, columns])
        if self.offsets is not None:
            grouped.mul_(scales).add_(self._grouped_table(self.offsets[:, columns]))
        elif self.zeros is not None:
            grouped.sub_(self._grouped_table(self.zeros[:, columns])).mul_(scales)
        else:
            grouped.sub_(8.0).mul_(scales)
        return codes

    def row_product(self) -> RowProduct | None:
        """A loop over words, with scales and zeros as the checkpoint has them."""
        groups = self.word_groups
        if not groups:
            return None
        shape = nibble_words.words_shape(self.stored_out_features, self.in_features, groups)
        table = (shape[0], groups, nibble_words.LANES)
        tables = [t for t in (self.scales, self.zeros, self.offsets) if t is not None]
        return RowProduct(
            function=nibble_words.word_row,
            shapes=((shape, torch.int32), *((table, t.dtype) for t in tables)),
            tensors=self._words,
            adopt=self._adopted_words,
            copied_bytes=sum(prod(table) * t.element_size() for t in tables),
        )

    def _words(self) -> list[torch.Tensor]:
        """What the loop reads; a copy unless the weight has words."""
        is_planar = self.lane_scales is None
        codes = nibble_words.planar_to_words(self.codes) if is_planar else self.codes
        shape = nibble_words.words_shape(
            self.stored_out_features, self.in_features, self.word_groups
        )
        return [codes.view(torch.int32).view(shape), *self.lane_tables()]

    def _adopted_words(self) -> list[torch.Tensor]:
        self.use_words()
        return self._words()

    def _grouped(self, codes: torch.Tensor) -> torch.Tensor:
        """A view [G, K/G, n] of [K, n] when groups are equal, else the same."""
        if not self.has_equal_groups:
            return codes
        return codes.view(self.num_groups, self.group_size, codes.shape[1])

    def _grouped_table(self, table: torch.Tensor) -> torch.Tensor:
        """[G, n] to what broadcasts over ``_grouped`` codes, in float32."""
        table = table.to(torch.float32)
        return table.unsqueeze(1) if self.has_equal_groups else table[self.group_ids()]


def planar_weight(weight: AffineWeight, *, for_int4: bool) -> PlanarWeight:
    """``weight`` (4 bits) in planar layout; with scales for torch's int4 product when asked."""
    block = block_size()
    group_size = int4_group_size(weight) if for_int4 else 0
    scales = _int4_scales(weight, group_size, block) if group_size else None
    fields = {n: t for n, t in weight.tensors().items() if n != "codes"}
    return PlanarWeight(
        bits=weight.bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
        out_features=weight.out_features,
        codes=pack_planar(weight.unpacked_codes(), block),
        int4_scales=scales,
        int4_group_size=group_size,
        **fields,
    )


def pack_planar(codes: torch.Tensor, block: int) -> torch.Tensor:
    """Codes uint8 [N, K], below 16, to uint8 [N'/B, K, B/2]."""
    padded = F.pad(codes, (0, 0, 0, -codes.shape[0] % block))
    low, high = padded.view(-1, 2, block // 2, codes.shape[1]).unbind(1)
    return (low | (high << 4)).transpose(1, 2).contiguous()


def int4_group_size(weight: AffineWeight) -> int:
    """The largest group of torch's int4 product that no group border of ``weight`` cuts, or 0."""
    borders = [weight.in_features]
    if weight.group_offsets is not None:
        borders += weight.group_offsets.tolist()
    elif weight.num_groups > 1:
        borders.append(weight.group_size)
    for size in INT4_GROUP_SIZES:
        if all(border % size == 0 for border in borders):
            return size
    return 0


def _int4_scales(weight: AffineWeight, group_size: int, block: int) -> torch.Tensor:
    """bfloat16 [K / group_size, N', 2]: scale, and what a code of 8 stands for."""
    scales = weight.scales.to(torch.float32)
    if weight.offsets is not None:
        middle = weight.offsets.to(torch.float32) + 8 * scales
    else:
        # From the rounded scale, so that a code equal to its zero stays exactly zero where it can.
        rounded = scales.to(torch.bfloat16).to(torch.float32)
        middle = (8.0 - weight.integer_zeros().to(torch.float32)) * rounded
    pairs = torch.stack((scales, middle), dim=-1).to(torch.bfloat16)
    rows = pairs[weight.group_ids()[::group_size]]
    return F.pad(rows, (0, 0, 0, -rows.shape[1] % block)).contiguous()


def int4_product_is_usable() -> bool:
    """Whether this torch has the int4 product and packs for it as this module does."""
    ops = torch.ops.aten
    if not hasattr(ops, "_weight_int4pack_mm_for_cpu"):
        return False
    block = block_size()
    codes = torch.arange(2 * block * 32).view(2 * block, 32).remainder(13).to(torch.uint8)
    wanted = ops._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return torch.equal(wanted.flatten(), pack_planar(codes, block).flatten())
