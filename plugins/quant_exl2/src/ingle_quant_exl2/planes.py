"""How ``kernel.py`` keeps an EXL2 weight (2, 3, 4, 5, 6 or 8 bits, mixed along K) in memory.

Shape letters: N output features (padded to a multiple of 64), K
input features in *quantised-row order* (the caller gathers ``x[:, perm]``), G scale groups.

A matrix is a few *sections* of K, each with one bit width and one group size. As in core's 4-bit
kernel, weights are the A operand of ``mma.m16n8k16`` and sit in memory in fragment order, so one
16-byte load per lane is a fragment. A code of 3, 5 or 6 bits is cut into two *planes*:

    bits   2     3       4     5       6       8
    planes 2     2 + 1   4     4 + 1   4 + 2   8

A chunk is 256 k's: 16 fields v of 16 k's. A b-bit chunk is b *blocks* (the low plane's, then the
high plane's) of 16 rows x 16 words; a word of a p-bit plane holds fields v of 16 / p each:

    words    int16 [N/16, blocks, lane 32, 8], lane = 4 g + t, element = (k8, row8, k1)
    row      tile * 16 + row8 * 8 + g
    field v  k = chunk * 256 + v // 2 * 32 + t * 8 + v % 2 * 4 + k8 * 2 + k1

so that a lane's eight values for two fields are contiguous in a row of ``x`` (one 16-byte load).
A section's last chunk may be short; blocks whose fields all lie past its end are not stored.

Scales stay as they are on disk, 4-bit codes s: ``(s + 1)^2 * group_scale[g]``. ``scale_codes`` is
uint8 [G, N/16, 8]: byte g of a tile holds row g in its low and row g + 8 in its high nibble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

CHUNK = 256
_N_MULTIPLE = 64
_WORK_FIELDS = 8

PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
"""Bit width -> widths of the low and the high plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows ``start:stop`` of K with one bit width; groups of ``group_size``, the last may be short.

    Attributes:
        block: Index of its first block within a row tile.
        group: Index of its first group in ``scale_codes``.
    """

    bits: int
    start: int
    stop: int
    group_size: int
    block: int = 0
    group: int = 0

    @property
    def chunks(self) -> int:
        """Chunks of 256 k's, the short last one included."""
        return -(-(self.stop - self.start) // CHUNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExl2:
    """An EXL2 weight in the kernel's order; see the top of the file.

    Attributes:
        words: int16 [N'/16, blocks, 32, 8].
        scale_codes: uint8 [G, N'/16, 8].
        group_scale: fp32 [G].
        sections: In order of K.
        out_features: N before padding.
        in_features: K.
        work: int32 [splits, 8], made by ``plan_splits``: what each program along K does.
    """

    words: torch.Tensor
    scale_codes: torch.Tensor
    group_scale: torch.Tensor
    sections: tuple[Section, ...]
    out_features: int
    in_features: int
    work: torch.Tensor

    @property
    def splits(self) -> int:
        """Programs along K."""
        return self.work.shape[0]


def _tail_blocks(bits: int, fields: int) -> tuple[int, int]:
    """Blocks of the low and the high plane that ``fields`` fields need."""
    low, high = PLANES[bits]
    return -(-fields * low // 16), -(-fields * high // 16)


def find_sections(group_bits: Sequence[int], group_rows: Sequence[int]) -> tuple[Section, ...]:
    """Joins neighbouring groups of equal bits and rows; ``block`` is set, groups are counted.

    A section ends where the width changes, after a group shorter than the ones before it, and
    where rows change. Raises ``ValueError`` for a group the kernel cannot serve.
    """
    sections: list[Section] = []
    start = block = 0
    for group, (bits, rows) in enumerate(zip(group_bits, group_rows, strict=True)):
        _check_group(group, bits, rows)
        last = sections[-1] if sections else None
        joins = (
            last is not None
            and last.bits == bits
            and (last.stop - last.start) % last.group_size == 0
            and rows <= last.group_size
        )
        if last is not None and joins:
            sections[-1] = replace(last, stop=start + rows)
        else:
            block += _section_blocks(last) if last is not None else 0
            size = next(s for s in (32, 64, 128) if rows <= s)
            new = Section(bits=bits, start=start, stop=start + rows, group_size=size)
            sections.append(replace(new, block=block, group=group))
        start += rows
    return tuple(sections)


def _check_group(group: int, bits: int, rows: int) -> None:
    if bits not in PLANES:
        raise ValueError(f"group {group} has {bits} bits, known are {sorted(PLANES)}")
    if rows % 32 or not 32 <= rows <= 128:
        raise ValueError(
            f"group {group} has {rows} rows, the kernel serves 32, 64, 96 and 128: use the fallback"
        )


def _section_blocks(section: Section) -> int:
    whole, left = divmod(section.stop - section.start, CHUNK)
    return whole * section.bits + sum(_tail_blocks(section.bits, left // 16))


def pack_exl2(
    codes: torch.Tensor,
    scale_codes: torch.Tensor,
    group_scale: torch.Tensor,
    groups: tuple[Sequence[int], Sequence[int]],
) -> PackedExl2:
    """Packs ``W[n, k] = (codes[n, k] - 2^(b-1)) * (scale_codes[g, n] + 1)^2 * group_scale[g]``.

    Args:
        codes: integers, [N, K], K in quantised-row order.
        scale_codes: integers 0..15, [G, N].
        group_scale: [G]; ``q_scale_max / 256``, rounded to fp16 for exact parity with the peer.
        groups: bits and rows of each of the G groups, in order of K.
    """
    n, k = codes.shape
    sections = find_sections(*groups)
    if sum(groups[1]) != k or scale_codes.shape != (len(groups[1]), n):
        raise ValueError(
            f"groups cover {sum(groups[1])} rows and scale codes are {tuple(scale_codes.shape)}, "
            f"codes are {(n, k)}: they must agree"
        )
    pad_n = -(-n // _N_MULTIPLE) * _N_MULTIPLE
    padded = torch.zeros(pad_n, k, dtype=torch.int32, device=codes.device)
    padded[:n] = codes
    scales = torch.zeros(len(groups[1]), pad_n, dtype=torch.uint8, device=codes.device)
    scales[:, :n] = scale_codes
    pair = scales.view(-1, pad_n // 16, 2, 8)
    packed = PackedExl2(
        words=torch.cat([_section_words(padded, s) for s in sections], 1).contiguous(),
        scale_codes=(pair[:, :, 0] | pair[:, :, 1] << 4).contiguous(),
        group_scale=group_scale.float(),
        sections=sections,
        out_features=n,
        in_features=k,
        work=torch.empty(0, _WORK_FIELDS, dtype=torch.int32, device=codes.device),
    )
    return plan_splits(packed, len(sections))


def _section_words(codes: torch.Tensor, section: Section) -> torch.Tensor:
    """int32 [N', K] -> int16 [N'/16, blocks of the section, 32, 8]."""
    n, length = codes.shape[0], section.stop - section.start
    padded = codes.new_zeros(n, section.chunks * CHUNK)
    padded[:, :length] = codes[:, section.start : section.stop]
    # chunk, pair, t, v % 2, (k8, k1) -> chunk, v, (k8, t, k1)
    v = padded.view(n, section.chunks, 8, 4, 2, 2, 2).permute(0, 1, 2, 4, 5, 3, 6)
    v = v.reshape(n, section.chunks, 16, 16)
    low, high = PLANES[section.bits]
    blocks = torch.cat([_plane(v, 0, low), _plane(v, low, high)], 2)
    # tile, row8, g, chunk, block, k8, t, k1 -> tile, chunk, block, g, t, k8, row8, k1
    blocks = blocks.view(n // 16, 2, 8, section.chunks, section.bits, 2, 4, 2)
    blocks = blocks.permute(0, 3, 4, 2, 6, 5, 1, 7)
    return blocks.reshape(n // 16, -1, 32, 8)[:, _kept_blocks(section).to(codes.device)]


def _kept_blocks(section: Section) -> torch.Tensor:
    """Indices, among all blocks of whole chunks, of the blocks that are stored: int64 [blocks]."""
    length = section.stop - section.start
    whole = length // CHUNK * section.bits
    low_kept, high_kept = _tail_blocks(section.bits, length % CHUNK // 16)
    low = PLANES[section.bits][0]
    tail = [*range(low_kept), *range(low, low + high_kept)]
    return torch.tensor([*range(whole), *(whole + block for block in tail)])


def _plane(fields: torch.Tensor, shift: int, width: int) -> torch.Tensor:
    """Bits ``shift .. shift + width`` of [N, C, 16 fields, 16] as int16 words [N, C, width, 16]."""
    n, chunks = fields.shape[:2]
    if not width:
        return fields.new_zeros(n, chunks, 0, 16, dtype=torch.int16)
    per_word = 16 // width
    parts = ((fields >> shift) & ((1 << width) - 1)).view(n, chunks, width, per_word, 16)
    steps = torch.arange(0, 16, width, device=fields.device, dtype=torch.int32)
    word = (parts << steps.view(1, 1, 1, -1, 1)).sum(3)
    return torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)


def plan_splits(packed: PackedExl2, splits: int) -> PackedExl2:
    """The same weight with its K work dealt to about ``splits`` programs, at least one a section.

    A row of ``work``: kind (index into ``kinds``), first block, chunks, first k, end of the
    section, first group, 0, 0. Programs get shares of about equal bytes.
    """
    rows = []
    for section, share in zip(packed.sections, split_shares(packed.sections, splits), strict=True):
        for i in range(share):
            first, last = (j * section.chunks // share for j in (i, i + 1))
            rows.append(_work_row(packed.sections, section, first, last))
    work = torch.tensor(rows, dtype=torch.int32, device=packed.words.device)
    return replace(packed, work=work)


def split_shares(sections: Sequence[Section], splits: int) -> list[int]:
    """How many of about ``splits`` programs each section gets: at least one, at most one a chunk,
    by its bytes."""
    total = sum(s.chunks * s.bits for s in sections)
    return [max(1, min(s.chunks, round(splits * s.chunks * s.bits / total))) for s in sections]


def _work_row(sections: tuple[Section, ...], section: Section, first: int, last: int) -> list[int]:
    return [
        kinds(sections).index((section.bits, section.group_size)),
        section.block + first * section.bits,
        last - first,
        section.start + first * CHUNK,
        section.stop,
        section.group + first * CHUNK // section.group_size,
        0,
        0,
    ]


def kinds(sections: tuple[Section, ...]) -> tuple[tuple[int, int], ...]:
    """The distinct (bits, group size) pairs, sorted; each is a branch of the compiled kernel."""
    return tuple(sorted({(s.bits, s.group_size) for s in sections}))


def dequantize_exl2(packed: PackedExl2) -> torch.Tensor:
    """The weight as fp32 [N, K], K in quantised-row order; plain torch."""
    tiles = packed.words.shape[0]
    parts = []
    for section in packed.sections:
        codes = section_codes(packed.words, section).float() - 2 ** (section.bits - 1)
        groups = -(-(section.stop - section.start) // section.group_size)
        code = packed.scale_codes[section.group : section.group + groups]
        pair = torch.stack([code & 15, code >> 4], 2).view(groups, tiles * 16)
        scale = (pair.float() + 1) ** 2
        scale *= packed.group_scale[section.group : section.group + groups, None]
        scale = scale.T.repeat_interleave(section.group_size, 1)
        parts.append(codes * scale[:, : codes.shape[1]])
    return torch.cat(parts, 1)[: packed.out_features]


def section_codes(words: torch.Tensor, section: Section) -> torch.Tensor:
    """The inverse of ``_section_words``: int32 [N', rows of the section]."""
    tiles, length = words.shape[0], section.stop - section.start
    stored = words[:, section.block : section.block + _section_blocks(section)]
    full = words.new_zeros(tiles, section.chunks * section.bits, 32, 8)
    full[:, _kept_blocks(section).to(words.device)] = stored
    # tile, chunk, block, g, t, k8, row8, k1 -> tile, row8, g, chunk, block, k8, t, k1
    blocks = full.view(tiles, section.chunks, section.bits, 8, 4, 2, 2, 2)
    blocks = blocks.permute(0, 6, 3, 1, 2, 5, 4, 7).reshape(
        tiles * 16, section.chunks, section.bits, 16
    )
    low, high = PLANES[section.bits]
    v = _fields(blocks[:, :, :low], low) | _fields(blocks[:, :, low:], high) << low
    # chunk, v // 2, v % 2, k8, t, k1 -> chunk, v // 2, t, v % 2, k8, k1
    v = v.view(tiles * 16, section.chunks, 8, 2, 2, 4, 2).permute(0, 1, 2, 5, 3, 4, 6)
    return v.reshape(tiles * 16, -1)[:, :length]


def _fields(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """The inverse of ``_plane``: int16 [N, C, width, 16] -> int32 [N, C, 16 fields, 16]."""
    n, chunks = blocks.shape[:2]
    if not width:
        return blocks.new_zeros(n, chunks, 16, 16, dtype=torch.int32)
    steps = torch.arange(0, 16, width, device=blocks.device, dtype=torch.int32)
    parts = blocks.to(torch.int32).unsqueeze(3) >> steps.view(1, 1, 1, -1, 1)
    return (parts & ((1 << width) - 1)).reshape(n, chunks, 16, 16)
