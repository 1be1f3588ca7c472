"""EXL2 on a CPU: one int4 product for a few bf16 rows, decode and multiply for everything else.

Letters: N output features as stored, K input features, R rows of activations, E nibble rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ingle.plugin import Epilogue, KernelUse, LinearWeight, MatmulKernel, PluginError, Support
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.nibble_tiles import NibbleTiles
from ingle.plugin.row_counts import MIN_FLOAT32_ROWS, with_rows
from ingle_quant_exl2.layout import Section
from ingle_quant_exl2.nibbles import (
    COLUMN_MULTIPLE,
    NibblePlan,
    block_columns,
    from_nibbles,
    pack_nibbles,
    packing_is_known,
    plan_nibbles,
    scales_and_offsets,
    scales_and_zeros,
    to_nibbles,
    unpack_nibbles,
)
from ingle_quant_exl2.packing import group_scales
from ingle_quant_exl2.weight import Exl2Weight, StoredExl2Weight

INT4_MAX_ROWS = 64
"""Up to here the int4 product is faster than decoding the matrix; above it loses by arithmetic."""
INT4_MAX_ROWS_COMPILED = 32
"""The same where decoding is compiled."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(kw_only=True, eq=False)
class NibbleExl2Weight(Exl2Weight):
    """A matrix as ``nibbles.py`` lays it out, exact scale codes kept beside the product's.

    Attributes:
        plan: Where each group's nibbles lie.
        nibbles: uint8 [N, E/2], torch's packing.
        scales_and_offsets: bfloat16 [E/group, N, 2].
        sources: int64 [E], quantised row that each nibble row reads, or None when E is K.
    """

    plan: NibblePlan
    nibbles: torch.Tensor
    scales_and_offsets: torch.Tensor
    sources: torch.Tensor | None = None

    def codes(self, section: Section, start: int, stop: int) -> torch.Tensor:
        """Unpacked from one or two rows of nibbles per row."""
        low = self._half(section, slice(start, stop), high=False)
        if section.bits <= 4:
            return low - (8 - (1 << (section.bits - 1)))
        high = self._half(section, slice(start, stop), high=True)
        return from_nibbles(high, low, section.bits)

    def _half(self, section: Section, columns: slice, *, high: bool) -> torch.Tensor:
        rows, kept = self.plan.section_rows(section, high=high)
        nibbles = unpack_nibbles(self.nibbles, columns, rows)
        return nibbles if kept is None else nibbles.index_select(0, kept)


def to_nibble_weight(weight: StoredExl2Weight) -> NibbleExl2Weight:
    """The same matrix in the layout of the int4 product."""
    plan = plan_nibbles(weight.layout)
    sources = plan.sources()
    return NibbleExl2Weight(
        in_features=weight.in_features,
        out_features=weight.out_features,
        stored_out_features=weight.stored_out_features,
        dtype=weight.dtype,
        layout=weight.layout,
        q_scale=weight.q_scale,
        q_scale_max=weight.q_scale_max,
        input_order=weight.input_order,
        plan=plan,
        nibbles=_pack(weight, plan),
        scales_and_offsets=scales_and_offsets(
            plan, group_scales(weight.q_scale, weight.q_scale_max)
        ),
        sources=None if plan.num_rows == weight.in_features else sources,
    )


def _pack(weight: StoredExl2Weight, plan: NibblePlan) -> torch.Tensor:
    """All nibbles, chunk by chunk: the packing's blocks of outputs do not depend on each other."""
    chunks = weight.column_chunks()
    parts = []
    for start in chunks:
        stop = min(start + chunks.step, weight.stored_out_features)
        codes = [weight.codes(section, start, stop) for section in weight.layout.sections]
        parts.append(pack_nibbles(to_nibbles(plan, torch.cat(codes))))
    return torch.cat(parts)


class Exl2CpuKernel(MatmulKernel):
    """All row counts and dtypes on a CPU, from packed weights.

    bf16 on few rows goes through torch's int4 product, whose only loss is a scale rounded to
    bf16. Otherwise a chunk of outputs at a time is decoded exactly and multiplied: in float32 for
    float32 and float16 activations, in bf16 for bf16.
    """

    name: ClassVar[str] = "exl2_cpu"
    priority: ClassVar[int] = 10

    def __init__(self) -> None:
        self._tiles = NibbleTiles()

    def supports(self, weight: LinearWeight, use: KernelUse) -> Support:
        """Every EXL2 weight on a CPU."""
        if not isinstance(weight, Exl2Weight):
            return Support(ok=False, reason="not an EXL2 weight")
        if use.device.type != "cpu" or weight.q_scale.device.type != "cpu":
            return Support(ok=False, reason="only on a CPU")
        if use.dtype not in DTYPES:
            return Support(ok=False, reason=f"activations in {use.dtype}")
        return Support(ok=True, reason="packed in memory; int4 product for few bf16 rows")

    def prepare(self, weight: LinearWeight) -> LinearWeight:
        """Nibbles for bf16 activations; for others, which need exact scales, nothing changes."""
        if not isinstance(weight, StoredExl2Weight) or weight.dtype is not torch.bfloat16:
            return weight
        if weight.stored_out_features % COLUMN_MULTIPLE or not packing_is_known():
            return weight
        return to_nibble_weight(weight)

    def matmul(
        self,
        x: torch.Tensor,
        weight: LinearWeight,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> torch.Tensor:
        """``x [R, K]``, in the weight's input order, times the weight: [R, N] in x's dtype."""
        if not isinstance(weight, Exl2Weight):
            raise PluginError(f"kernel {self.name} was given a {type(weight).__name__}.")
        num_rows = x.shape[0]
        if num_rows and isinstance(weight, NibbleExl2Weight) and x.dtype is torch.bfloat16:
            has_tiles = self._tiles.decode.is_compiled and _fits_tiles(weight)
            if num_rows <= (INT4_MAX_ROWS_COMPILED if has_tiles else INT4_MAX_ROWS):
                result = _int4_product(x, weight)
                return result if out is None else out.copy_(result)
            if has_tiles:
                return self._tiled_product(x, weight, out)
        if out is None:
            out = x.new_empty(num_rows, weight.stored_out_features)
        return _decoded_product(x, weight, out)

    def functions(self, weight: LinearWeight) -> Sequence[CompiledFunction]:
        """What decodes nibbles for many rows."""
        known = isinstance(weight, NibbleExl2Weight) and _fits_tiles(weight)
        return (self._tiles.decode,) if known else ()

    def _tiled_product(
        self, x: torch.Tensor, weight: NibbleExl2Weight, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Every row of nibbles is a row of a bf16 matrix; wide codes have two."""
        if out is None:
            out = x.new_empty(x.shape[0], weight.stored_out_features)
        codes = weight.nibbles.view(-1, weight.plan.num_rows, block_columns() // 2)
        groups = weight.plan.num_rows // weight.plan.group_size
        scales = group_scales(weight.q_scale, weight.q_scale_max)
        tables = partial(_columns, scales_and_zeros(weight.plan, scales))
        return self._tiles.product(_nibble_inputs(x, weight), codes, groups, tables, out)


def _fits_tiles(weight: NibbleExl2Weight) -> bool:
    """Whether its outputs fill whole blocks; those left over lie otherwise in torch's packing."""
    return weight.stored_out_features % block_columns() == 0


def _columns(
    tables: tuple[torch.Tensor, torch.Tensor], start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [G, N] of outputs ``start:stop``."""
    return tables[0][:, start:stop], tables[1][:, start:stop]


def _nibble_inputs(x: torch.Tensor, weight: NibbleExl2Weight) -> torch.Tensor:
    """The input of every nibble row: [R, E]."""
    return x.contiguous() if weight.sources is None else x.index_select(1, weight.sources)


def _int4_product(x: torch.Tensor, weight: NibbleExl2Weight) -> torch.Tensor:
    rows = _nibble_inputs(x, weight)
    return torch._weight_int4pack_mm_for_cpu(
        rows, weight.nibbles, weight.plan.group_size, weight.scales_and_offsets
    )


def _decoded_product(x: torch.Tensor, weight: Exl2Weight, out: torch.Tensor) -> torch.Tensor:
    dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    num_rows = x.shape[0]
    rows = x.to(dtype)
    if dtype is torch.float32:
        rows = with_rows(rows, max(num_rows, MIN_FLOAT32_ROWS))
    chunks = weight.column_chunks()
    for start in chunks:
        stop = min(start + chunks.step, weight.stored_out_features)
        out[:, start:stop] = (rows @ weight.columns(start, stop, dtype))[:num_rows]
    return out
