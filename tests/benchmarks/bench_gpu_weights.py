"""Random weights and caches for ``bench_gpu.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ingle.attention.paged_triton import PagedCache, PagedRows
from ingle.attention.reference import attend
from ingle.builtin.affine_triton import PackedW4, pack_w4
from ingle.builtin.kv_native_triton import read_native
from ingle.plugin import PagedSide
from ingle_kv_fp8.triton_io import read_e4m3
from ingle_quant_exl2.planes import PackedExl2, pack_exl2, plan_splits

Packed = TypeVar("Packed", PackedW4, PackedExl2)
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TIMED = ("2 bit", "3 bit", "4 bit", "6 bit", "mixed")


def random_w4(
    n: int, k: int, device: torch.device, *, group_size: int = 128, random_words: bool = False
) -> PackedW4:
    """A random 4-bit weight. ``random_words``: quicker, and as good where only time matters."""
    groups = k // group_size
    scales = (torch.rand(groups, n, device=device) * 0.01 + 0.005).half()
    zeros = torch.randint(0, 17, (groups, n), device=device)
    if not random_words:
        codes = torch.randint(0, 16, (n, k), device=device)
        return pack_w4(codes, scales, zeros, group_size)
    shape = (n // 16, k // 128, 2, 32, 8)
    words = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device)
    return PackedW4(
        words=words,
        scales=scales,
        zeros=zeros.half(),
        out_features=n,
        in_features=k,
        group_size=group_size,
    )


def exl2_cases(n: int, k: int, device: torch.device) -> Iterator[tuple[str, PackedExl2]]:
    """Each width alone, then a mix as a converter makes at 2.5 bit, all split about 8 ways."""
    for bits, size in ((2, 64), (3, 64), (4, 128), (5, 128), (6, 128), (8, 128)):
        yield f"{bits} bit", random_exl2([(bits, size)] * (k // size), n, device)
    blocks = k // 64
    three = max(1, blocks // 4)
    mixed = [(5, 32)] * 2 + [(3, 64)] * three + [(2, 64)] * (blocks - three - 1)
    yield "mixed", random_exl2(mixed, n, device)


def random_exl2(groups: list[tuple[int, int]], n: int, device: torch.device) -> PackedExl2:
    """A random EXL2 weight with the given (bits, rows) groups."""
    bits, rows = (list(column) for column in zip(*groups, strict=True))
    width = torch.tensor(bits, device=device).repeat_interleave(torch.tensor(rows, device=device))
    codes = (torch.rand(n, len(width), device=device) * 2.0**width).int()
    scale_codes = torch.randint(0, 16, (len(groups), n), device=device)
    group_scale = torch.rand(len(groups), device=device) * 1e-3 + 1e-3
    return plan_splits(pack_exl2(codes, scale_codes, group_scale, (bits, rows)), 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCache:
    """A cache, a query [1, 32, 128] fp16 for it, and blocks in no order.

    Attributes:
        tables: int32 [copies, blocks of a sequence].
        length: Tokens of every sequence.
    """

    pages: PagedCache
    query: torch.Tensor
    tables: torch.Tensor
    length: int

    def rows(self, copy: int = 0, new: int = 1) -> PagedRows:
        """One sequence, its last ``new`` tokens."""

        def tensor(number: int) -> torch.Tensor:
            return torch.full((1,), number, dtype=torch.int32, device=self.query.device)

        return PagedRows(
            block_table=self.tables[copy : copy + 1],
            seq_lens=tensor(self.length),
            row_starts=tensor(0),
            new_lens=tensor(new),
            max_new=new,
        )

    def reference(self, query: torch.Tensor) -> torch.Tensor:
        """Attention of ``query`` [T, 32, 128] over the first sequence, float32."""
        sides = []
        for side, is_value in ((self.pages.k, False), (self.pages.v, True)):
            numbers = side.tensors[0][self.tables[0].long()]
            if len(side.tensors) == 2:
                decoded = numbers.cpu().view(torch.float8_e4m3fn).float().to(query.device)
                numbers = decoded * side.tensors[1][:, None, None]
            numbers = numbers.transpose(2, 3) if is_value else numbers
            sides.append(numbers.transpose(0, 1).flatten(1, 2)[:, : self.length])
        return attend(query.float(), sides[0], sides[1], HEAD_DIM**-0.5)


def random_cache(
    device: torch.device,
    length: int,
    page: int,
    *,
    fp8: bool = False,
    copies: int = 1,
    by_card: bool = True,
) -> RandomCache:
    """``copies`` sequences of ``length`` tokens in blocks of ``page``; ``by_card``: e4m3 is
    converted by the card's instruction."""
    per_copy = -(-length // page)
    blocks = per_copy * copies
    scale = torch.full((KV_HEADS,), 0.01, device=device)
    sides = []
    for is_value in (False, True):
        tile = (HEAD_DIM, page) if is_value else (page, HEAD_DIM)
        numbers = torch.randn(blocks, KV_HEADS, *tile, device=device, dtype=torch.float16)
        if fp8:
            codes = (numbers.float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
            meta = (KV_HEADS, is_value, by_card, device.type == "cuda")
            sides.append(PagedSide(tensors=(codes.view(torch.uint8), scale), meta=meta))
        else:
            sides.append(PagedSide(tensors=(numbers,), meta=(KV_HEADS, is_value)))
    read = read_e4m3 if fp8 else read_native
    pages = PagedCache(
        k=sides[0], v=sides[1], k_read=read, v_read=read, num_kv_heads=KV_HEADS, block_size=page
    )
    tables = torch.randperm(blocks, device=device).to(torch.int32).view(copies, per_copy)
    query = torch.randn(1, QUERY_HEADS, HEAD_DIM, device=device, dtype=torch.float16)
    return RandomCache(pages=pages, query=query, tables=tables, length=length)


def _data(packed: PackedW4 | PackedExl2) -> dict[str, torch.Tensor]:
    """The tensors a product reads."""
    if isinstance(packed, PackedExl2):
        names = ("words", "scale_codes", "group_scale")
    else:
        names = ("words", "scales", "zeros")
    tensors = {name: getattr(packed, name) for name in names}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def nbytes(packed: PackedW4 | PackedExl2) -> int:
    """Bytes one product reads of the weight."""
    return sum(t.numel() * t.element_size() for t in _data(packed).values())


def clone(packed: Packed) -> Packed:
    """The same weight in other memory."""
    return replace(packed, **{name: tensor.clone() for name, tensor in _data(packed).items()})
