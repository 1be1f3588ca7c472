"""The kernels that ``affine_cpu`` offers.

Shape letters: R rows of activations, N output features, K input features, B block of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch

from ingle.builtin.byte_cpu import ByteWeight, byte_weight
from ingle.builtin.byte_products import ByteProducts
from ingle.builtin.planar_cpu import (
    PlanarWeight,
    int4_group_size,
    int4_product_is_usable,
    planar_weight,
)
from ingle.builtin.word_products import WordProducts
from ingle.plugin import AffineWeight, Epilogue, KernelUse, LinearWeight, MatmulKernel, Support
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.nibble_tiles import NibbleTiles
from ingle.plugin.row_counts import MIN_FLOAT32_ROWS, with_rows

CHUNK_WEIGHTS = 1 << 20
"""Weights decoded at a time: 4 MiB in float32, which stay in the cache until they are used."""

MAX_INT4_ROWS = 48
"""Torch's int4 product costs the same for every row; from here on decoding once is cheaper
(4096 x 4096 on one Zen 5 core: 0.39 ms a row against 22 ms)."""

MAX_INT4_ROWS_COMPILED = 32
"""The same where decoding is compiled."""


ByteKind = tuple[torch.dtype, torch.dtype | None]
"""Of ``ByteProducts``."""

WordKind = tuple[int, torch.dtype, torch.dtype | None]
"""Of ``WordProducts``."""


class AffineKernel(MatmulKernel):
    """Any width, any dtype: decodes a few output rows at a time and multiplies."""

    name: ClassVar[str] = "affine_cpu"
    priority: ClassVar[int] = 10

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """Affine weights on a CPU."""
        if not isinstance(weight, AffineWeight):
            return Support(ok=False, reason="not an affine weight")
        if use.device.type != "cpu" or weight.codes.device.type != "cpu":
            return Support(ok=False, reason="only on a CPU")
        if not use.dtype.is_floating_point:
            return Support(ok=False, reason=f"activations are {use.dtype}, not floating point")
        return Support(ok=True, reason=f"{weight.bits}-bit codes decoded in chunks at every call")

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` times the weight, decoded chunk by chunk."""
        assert isinstance(weight, AffineWeight)
        out = x.new_empty(x.shape[0], weight.stored_out_features) if out is None else out
        if x.shape[0] == 0:
            return out
        for start, decoded in self.decoded_chunks(weight):
            out[:, start : start + decoded.shape[1]] = product(x, decoded)
        return out

    def decoded_chunks(self, weight: AffineWeight) -> Iterator[tuple[int, torch.Tensor]]:
        """First output and decoded weights (float32 [K, n]) of every chunk."""
        rows = max(1, CHUNK_WEIGHTS // weight.in_features)
        for start in range(0, weight.stored_out_features, rows):
            stop = min(start + rows, weight.stored_out_features)
            yield start, weight.decode_rows(start, stop).T


class ByteKernel(AffineKernel):
    """8 bits: the same, with a compiled step's product."""

    name: ClassVar[str] = "affine_cpu_bytes"
    priority: ClassVar[int] = 20

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """8-bit affine weights on a CPU, of whole words."""
        support = super().supports(weight, use)
        if not support or not isinstance(weight, AffineWeight):
            return support
        if weight.bits != 8 or weight.in_features % 4:
            reason = f"only 8 bits in whole words, not {weight.bits} of {weight.in_features}"
            return Support(ok=False, reason=reason)
        return support

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """The same tensors in a weight that knows its rows."""
        return byte_weight(weight) if isinstance(weight, AffineWeight) else weight


class ByteTileKernel(ByteKernel):
    """8 bits in bfloat16: outputs decoded some at a time, compiled."""

    name: ClassVar[str] = "affine_cpu_byte_tiles"
    priority: ClassVar[int] = 30

    def __init__(self) -> None:
        self._products: dict[ByteKind, ByteProducts] = {}

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """The same in bfloat16."""
        support = super().supports(weight, use)
        if support and use.dtype is not torch.bfloat16:
            return Support(ok=False, reason=f"only bfloat16, not {use.dtype}")
        return support

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` times the weight."""
        if x.shape[0] == 0 or not isinstance(weight, ByteWeight) or not weight.byte_groups:
            return super().matmul(x, weight, out=out)
        products = self._products_with(weight)
        if not products.decode.is_compiled:
            return super().matmul(x, weight, out=out)
        out = x.new_empty(x.shape[0], weight.stored_out_features) if out is None else out
        return products.product(x, weight.bytes_by_group(), weight.tables(), out)

    def functions(self, weight: LinearWeight) -> Sequence[CompiledFunction]:
        """What decodes bytes."""
        if not isinstance(weight, ByteWeight) or not weight.byte_groups:
            return ()
        return (self._products_with(weight).decode,)

    def _products_with(self, weight: ByteWeight) -> ByteProducts:
        zeros = weight.offsets if weight.zeros is None else weight.zeros
        kind = (weight.scales.dtype, None if zeros is None else zeros.dtype)
        if kind not in self._products:
            self._products[kind] = ByteProducts(*kind)
        return self._products[kind]


class PlanarKernel(AffineKernel):
    """4 bits in planar layout, any dtype: the same, several times faster."""

    name: ClassVar[str] = "affine_cpu_planar"
    priority: ClassVar[int] = 20

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """4-bit affine weights on a CPU."""
        support = super().supports(weight, use)
        if support and isinstance(weight, AffineWeight) and weight.bits != 4:
            return Support(ok=False, reason=f"only 4 bits, not {weight.bits}")
        return support

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Lays the nibbles out in blocks."""
        if isinstance(weight, PlanarWeight) or not isinstance(weight, AffineWeight):
            return weight
        return planar_weight(weight, for_int4=False)

    def decoded_chunks(self, weight: AffineWeight) -> Iterator[tuple[int, torch.Tensor]]:
        """The same, in whole blocks."""
        if not isinstance(weight, PlanarWeight):
            yield from super().decoded_chunks(weight)
            return
        size, num_blocks = weight.block_size, weight.codes.shape[0]
        step = max(1, CHUNK_WEIGHTS // (weight.in_features * size))
        for first in range(0, num_blocks, step):
            yield first * size, weight.decode_blocks(first, min(first + step, num_blocks))


class Int4Kernel(PlanarKernel):
    """4 bits in bfloat16: torch's int4 product for a few rows, decoded blocks for many."""

    name: ClassVar[str] = "affine_cpu_int4"
    priority: ClassVar[int] = 30

    def __init__(self) -> None:
        self._words: dict[WordKind, WordProducts] = {}
        self._usable = int4_product_is_usable()
        self._tiles = NibbleTiles()

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """bfloat16 activations and groups that the int4 product can take."""
        support = super().supports(weight, use)
        if not support or not isinstance(weight, AffineWeight):
            return support
        if use.dtype is not torch.bfloat16:
            return Support(ok=False, reason=f"only bfloat16 is fast and exact, not {use.dtype}")
        if not self._usable:
            return Support(ok=False, reason="this torch or processor packs int4 another way")
        if isinstance(weight, PlanarWeight):
            prepared = weight.int4_scales is not None
            return Support(ok=prepared, reason="int4 product" if prepared else "prepared without")
        if not int4_group_size(weight):
            reason = f"groups of {weight.group_size} over {weight.in_features} inputs do not fit"
            return Support(ok=False, reason=reason)
        return Support(ok=True, reason="torch's int4 product, decoded blocks for many rows")

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Lays the nibbles out in blocks and rounds scales and offsets to bfloat16 beside."""
        if isinstance(weight, PlanarWeight) or not isinstance(weight, AffineWeight):
            return weight
        return planar_weight(weight, for_int4=True)

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]`` times the weight."""
        if not isinstance(weight, PlanarWeight) or weight.int4_scales is None:
            return super().matmul(x, weight, out=out)
        if x.dtype is not torch.bfloat16 or x.shape[0] == 0:
            return super().matmul(x, weight, out=out)
        if weight.lane_scales is not None:
            out = x.new_empty(x.shape[0], weight.stored_out_features) if out is None else out
            products = self._word_products(weight)
            return products.product(x, weight.word_codes(), weight.lane_tables(), out)
        has_tiles = self._tiles.decode.is_compiled and fits_tiles(weight)
        if x.shape[0] <= (MAX_INT4_ROWS_COMPILED if has_tiles else MAX_INT4_ROWS):
            return int4_product(x, weight, out)
        if not has_tiles:
            return super().matmul(x, weight, out=out)
        if out is None:
            out = x.new_empty(x.shape[0], weight.stored_out_features)
        tables = partial(_tables, weight)
        return self._tiles.product(x, weight.codes, weight.num_groups, tables, out)

    def functions(self, weight: LinearWeight) -> Sequence[CompiledFunction]:
        """What decodes planes for many rows, and what multiplies by words, should the weight be
        rewritten to these."""
        if not isinstance(weight, PlanarWeight) or weight.int4_scales is None:
            return ()
        words = self._word_products(weight).functions if weight.word_groups else ()
        return (*words, self._tiles.decode) if fits_tiles(weight) else words

    def _word_products(self, weight: PlanarWeight) -> WordProducts:
        zeros = weight.offsets if weight.zeros is None else weight.zeros
        group = weight.in_features // weight.word_groups
        kind = (group, weight.scales.dtype, None if zeros is None else zeros.dtype)
        if kind not in self._words:
            self._words[kind] = WordProducts(*kind)
        return self._words[kind]


def int4_product(x: torch.Tensor, weight: PlanarWeight, out: torch.Tensor | None) -> torch.Tensor:
    """torch's own product; ``x`` [R, K] in bfloat16."""
    assert weight.int4_scales is not None
    packed = weight.codes.view(-1, weight.in_features // 2)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), packed, weight.int4_group_size, weight.int4_scales
    )
    if y.shape[1] != weight.stored_out_features:
        y = y[:, : weight.stored_out_features].contiguous()
    return y if out is None else out.copy_(y)


def fits_tiles(weight: PlanarWeight) -> bool:
    """Whether ``NibbleTiles`` can decode it: integer zeros and equal groups."""
    return weight.offsets is None and weight.has_equal_groups


def _tables(weight: PlanarWeight, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [G, stop - start] of outputs ``start:stop``."""
    scales = weight.scales[:, start:stop]
    if weight.zeros is None:
        return scales, torch.full_like(scales, 8.0, dtype=torch.float16)
    return scales, weight.zeros[:, start:stop]


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x [R, K]`` times ``matrix`` (float32 [K, n]), rounded once to the dtype of ``x``.

    In bfloat16 the processor has instructions for it; float16 has none and is wider in float32.
    Few float32 rows are filled up, because torch sums a single row in one long chain, which
    loses digits, and because a row then gives the same bits alone as among others.
    """
    if x.dtype is torch.bfloat16:
        return x @ matrix.to(x.dtype)
    rows = x.to(torch.float32)
    rows = with_rows(rows, max(x.shape[0], MIN_FLOAT32_ROWS))
    return (rows @ matrix)[: x.shape[0]].to(x.dtype)
