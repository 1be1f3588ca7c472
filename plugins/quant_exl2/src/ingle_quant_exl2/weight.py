"""One EXL2 matrix: what it means, and how it is kept when it comes from disk.

Letters: N output features as stored, K input features, G groups, W words of 32 bits.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import torch

from ingle.plugin import LinearWeight, TritonDecode
from ingle_quant_exl2.layout import ROW_UNIT, Layout, Section
from ingle_quant_exl2.packing import group_scales, unpack_codes

CHUNK_ELEMENTS = 1 << 22
"""Weights decoded at a time on a CPU: bounds scratch memory to some tens of MiB."""
DEVICE_CHUNK_ELEMENTS = 1 << 24
"""The same on a card, where every small operation costs a launch."""
COLUMN_UNIT = 64
"""Column chunks are a multiple of this, which suits every packing."""


@dataclass(kw_only=True, eq=False)
class Exl2Weight(LinearWeight):
    """A matrix whose rows (input features, in quantised order) have 2 to 8 bits.

    Attributes:
        in_features: K.
        out_features: N without padding.
        stored_out_features: N.
        dtype: torch dtype of the activations it will meet; kernels choose a layout by it.
        layout: Where each group lies.
        q_scale: int32 [G, N/8], eight 4-bit scale codes a word.
        q_scale_max: float16 [G].
        input_order: int64 [K]: input feature of each quantised row, or None when they agree.
    """

    in_features: int
    out_features: int
    stored_out_features: int
    dtype: torch.dtype
    layout: Layout
    q_scale: torch.Tensor
    q_scale_max: torch.Tensor
    input_order: torch.Tensor | None = None

    @abstractmethod
    def codes(self, section: Section, start: int, stop: int) -> torch.Tensor:
        """Codes of a section's rows at outputs ``start:stop``: [rows, stop-start] uint8."""

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Weights of outputs ``start:stop`` (multiples of 8), rows in quantised order.

        Returns [K, stop-start] in ``dtype``. Each is rounded to float16 first, which is the
        format's own rounding, except for bfloat16, whose rounding hides it.
        """
        scales = group_scales(self.q_scale[:, start // 8 : stop // 8], self.q_scale_max)
        units = torch.tensor(self.layout.unit_groups, device=scales.device)
        unit_scales = scales.float().index_select(0, units)
        result = torch.empty(self.in_features, stop - start, dtype=dtype, device=scales.device)
        for section in self.layout.sections:
            # Codes go to float32 and never straight to float16: torch has no fast way for that.
            rows = self.codes(section, start, stop).float().sub_(1 << (section.bits - 1))
            first, last = section.start // ROW_UNIT, section.stop // ROW_UNIT
            rows.view(-1, ROW_UNIT, stop - start).mul_(unit_scales[first:last, None])
            exact = rows if dtype is torch.bfloat16 else rows.half()
            result[section.start : section.stop] = exact
        return result

    def column_chunks(self) -> range:
        """Where to cut the outputs so that scratch memory stays small beside the matrix."""
        elements = CHUNK_ELEMENTS if self.q_scale.is_cpu else DEVICE_CHUNK_ELEMENTS
        size = max(1, elements // (self.in_features * COLUMN_UNIT)) * COLUMN_UNIT
        return range(0, self.stored_out_features, size)

    def dequantize(self) -> torch.Tensor:
        """[N, K] float16, input features in their original order; bit-equal to exllamav2's."""
        shape = (self.stored_out_features, self.in_features)
        result = torch.empty(shape, dtype=torch.float16, device=self.q_scale.device)
        inverse = None if self.input_order is None else torch.argsort(self.input_order)
        chunks = self.column_chunks()
        for start in chunks:
            stop = min(start + chunks.step, self.stored_out_features)
            rows = self.columns(start, stop, torch.float16)
            if inverse is not None:
                rows = rows.index_select(0, inverse)
            result[start:stop] = rows.T
        return result

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor field, by its name here; ``input_order`` only when there is one."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """A copy that holds ``tensors`` instead."""
        changes: dict[str, Any] = dict(tensors)
        return dataclasses.replace(self, **changes)


@dataclass(kw_only=True, eq=False)
class StoredExl2Weight(Exl2Weight):
    """A matrix as it lies on disk.

    Attributes:
        q_weight: int32 [W, N], the bit streams of all groups.
    """

    q_weight: torch.Tensor

    @property
    def triton(self) -> TritonDecode | None:
        """Decodes this layout; None where triton is not installed."""
        if find_spec("triton") is None:
            return None
        from ingle_quant_exl2.tiles import exl2_decode

        return exl2_decode(self)

    def codes(self, section: Section, start: int, stop: int) -> torch.Tensor:
        """Unpacked from the words of the section."""
        words = self.q_weight[section.word : section.word + section.num_words, start:stop]
        return unpack_codes(words, section.bits)
