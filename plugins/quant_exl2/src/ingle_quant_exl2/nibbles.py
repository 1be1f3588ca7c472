"""EXL2 codes as nibbles in the packing of torch's int4 product for CPUs.

Every section becomes rows of 4-bit codes with a bf16 scale and offset per group of rows, so that
one call of ``torch._weight_int4pack_mm_for_cpu`` multiplies a whole matrix of mixed widths:

    2, 3, 4 bits   one nibble: code - 2**(bits-1) + 8
    5, 6, 8 bits   two nibbles, high and low, in two rows that read the same input feature:
                   w = 16 * scale * (high - 8) + scale * (low - 8) + offset

torch's packing, read from its results and checked by ``packing_is_known`` before use: blocks of B
outputs (64 with AVX-512, 32 with AVX2), in each block B/2 bytes for every row, output n of the
block in the low nibble of byte n and output B/2 + n in its high nibble; outputs left over after
the last whole block lie two neighbours to a byte.

Letters: N output features, K input features, E nibble rows, G scale groups of the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingle_quant_exl2.layout import ROW_UNIT, Layout, Section

GROUP_SIZES = (128, 64, 32)
COLUMN_MULTIPLE = 16
"""torch's product refuses other numbers of outputs."""


def centring(bits: int) -> int:
    """What is added to a code of 5, 6 or 8 bits before it is cut in halves: it centres the low
    one. Not for 8 bits, whose high half would overflow."""
    return 8 if bits < 8 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One group's rows, as one half of its nibbles.

    Attributes:
        group: Index of the EXL2 group.
        source: The group: its bits and its rows.
        start: First nibble row.
        rows: Nibble rows with padding, a multiple of the product's group size.
        high: Whether these are the high halves of codes wider than 4 bits.
    """

    group: int
    source: Section
    start: int
    rows: int
    high: bool = False

    @property
    def has_offset(self) -> bool:
        """Whether its nibbles count from 0 and not from 8: only low halves of 8-bit codes."""
        return self.source.bits == 8 and not self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class NibblePlan:
    """Where each group's nibbles lie.

    Attributes:
        group_size: Rows that share a scale in the product.
        runs: In order of nibble rows: every group once, then the low halves of the wide ones.
    """

    group_size: int
    runs: tuple[Run, ...]

    @property
    def num_rows(self) -> int:
        """E."""
        return self.runs[-1].start + self.runs[-1].rows

    def section_rows(self, section: Section, *, high: bool) -> tuple[slice, torch.Tensor | None]:
        """Nibble rows of one half of a section, and which of them are not padding (None: all)."""
        runs = [
            run
            for run in self.runs
            if run.high == high and section.start <= run.source.start < section.stop
        ]
        rows = slice(runs[0].start, runs[-1].start + runs[-1].rows)
        if all(run.rows == run.source.rows for run in runs):
            return rows, None
        offsets = [torch.arange(run.source.rows) + run.start - rows.start for run in runs]
        return rows, torch.cat(offsets)

    def sources(self) -> torch.Tensor:
        """Quantised row that each nibble row reads: int64 [E]; padding reads its group's last."""
        return torch.cat(
            [
                torch.arange(run.rows).clamp_(max=run.source.rows - 1) + run.source.start
                for run in self.runs
            ]
        )


def plan_nibbles(layout: Layout) -> NibblePlan:
    """The plan with the group size that takes the fewest bytes: small ones pad less, large ones
    have fewer scales (4 bytes per output and group)."""
    plans = [_plan(layout, size) for size in GROUP_SIZES]
    return min(plans, key=lambda plan: plan.num_rows / 2 + plan.num_rows / plan.group_size * 4)


def _plan(layout: Layout, group_size: int) -> NibblePlan:
    runs: list[Run] = []
    start = 0
    wide = [(i, group) for i, group in enumerate(layout.groups) if group.bits > 4]
    first = [(i, group, group.bits > 4) for i, group in enumerate(layout.groups)]
    for index, group, high in [*first, *((i, group, False) for i, group in wide)]:
        rows = -(-group.rows // group_size) * group_size
        runs.append(Run(group=index, source=group, start=start, rows=rows, high=high))
        start += rows
    return NibblePlan(group_size=group_size, runs=tuple(runs))


def to_nibbles(plan: NibblePlan, codes: torch.Tensor) -> torch.Tensor:
    """Nibbles ``[E, N]`` uint8 of codes ``[K, N]`` uint8; padding stands for a weight of zero."""
    result = torch.empty((plan.num_rows, codes.shape[1]), dtype=torch.uint8)
    for run in plan.runs:
        end = run.start + run.source.rows
        result[run.start : end] = _to_half(run, codes[run.source.start : run.source.stop])
        result[end : run.start + run.rows] = 0 if run.has_offset else 8
    return result


def _to_half(run: Run, codes: torch.Tensor) -> torch.Tensor:
    middle = 1 << (run.source.bits - 1)
    if run.source.bits <= 4:
        return codes + (8 - middle)
    if not run.high:
        return (codes + centring(run.source.bits)) & 15
    return ((codes + centring(run.source.bits)) >> 4) + (8 - middle // 16)


def from_nibbles(high: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 5, 6 or 8 bits from their halves, all uint8; undoes ``to_nibbles``."""
    middle = 1 << (bits - 1)
    return ((high - (8 - middle // 16)) << 4) + low - centring(bits)


def scales_and_offsets(plan: NibblePlan, scales: torch.Tensor) -> torch.Tensor:
    """What the product wants beside the nibbles: bfloat16 [G, N, 2] of ``scales`` [groups, N].

    Offsets are 8 scales or none and high halves count 16 scales: exact multiples, so all parts of
    a weight carry the same rounding of the scale to bfloat16.
    """
    rounded = scales.to(torch.bfloat16)
    parts = []
    for run in plan.runs:
        scale = rounded[run.group] * 16 if run.high else rounded[run.group]
        offset = scale * 8 if run.has_offset else torch.zeros_like(scale)
        pair = torch.stack([scale, offset], 1)
        parts.append(pair.expand(run.rows // plan.group_size, -1, -1))
    return torch.cat(parts).contiguous()


def scales_and_zeros(plan: NibblePlan, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without rounding: float32 scales and float16 zeros, both [G, N], of ``scales``
    float16 [groups, N]."""
    counts = torch.tensor([run.rows // plan.group_size for run in plan.runs])
    groups = torch.tensor([run.group for run in plan.runs])
    factors = torch.tensor([16.0 if run.high else 1.0 for run in plan.runs])
    zeros = torch.tensor([0.0 if run.has_offset else 8.0 for run in plan.runs])
    by_run = scales.float().index_select(0, groups) * factors[:, None]
    by_group = zeros.half().repeat_interleave(counts)
    rows = by_run.repeat_interleave(counts, 0)
    return rows, by_group[:, None].expand(-1, scales.shape[1])


def pack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """torch's packing ``[N, E/2]`` uint8 of nibbles ``[E, N]`` uint8."""
    rows = nibbles.T.to(torch.int32).contiguous()
    return torch._convert_weight_to_int4pack_for_cpu(rows, 1)


def unpack_nibbles(packed: torch.Tensor, columns: slice, rows: slice) -> torch.Tensor:
    """Nibbles ``[rows, columns]`` uint8 of ``packed [N, E/2]``; columns start on a whole block and
    stop on one, or at N."""
    size, num_rows = block_columns(), packed.shape[1] * 2
    num_blocks = packed.shape[0] // size
    blocks = packed[: num_blocks * size].view(num_blocks, num_rows, size // 2)
    part = blocks[columns.start // size : columns.stop // size, rows].transpose(0, 1)
    halves = _nibbles(part, 2)
    if columns.stop <= num_blocks * size:
        return halves
    tail = packed[num_blocks * size :].view(num_rows, -1)[rows]
    return torch.cat([halves, _nibbles(tail, 2)], 1)


def _nibbles(data: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack([data & 15, data >> 4], dim).flatten(1)


def block_columns() -> int:
    """B: outputs in a block of the packing on this processor."""
    return 64 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 32


def packing_is_known() -> bool:
    """Whether this torch has the int4 product, and ``unpack_nibbles`` undoes its packing here."""
    if not hasattr(torch, "_weight_int4pack_mm_for_cpu"):
        return False
    if not hasattr(torch, "_convert_weight_to_int4pack_for_cpu"):
        return False
    columns = 2 * block_columns() + COLUMN_MULTIPLE
    generator = torch.Generator().manual_seed(0)
    nibbles = torch.randint(0, 16, (ROW_UNIT, columns), generator=generator, dtype=torch.uint8)
    packed = pack_nibbles(nibbles)
    return torch.equal(unpack_nibbles(packed, slice(0, columns), slice(0, ROW_UNIT)), nibbles)
