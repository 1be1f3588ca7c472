"""Random weights and caches for ``bench_gpu.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from ingle.attention.paged_triton import PagedKV, encode_e4m3
from ingle.builtin.affine_triton import PackedW4, pack_w4
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


def random_cache(
    device: torch.device, length: int, page: int, *, fp8: bool = False, copies: int = 1
) -> tuple[PagedKV, torch.Tensor, torch.Tensor]:
    """A cache, a query [1, 1, 32, 128] fp16, and one block table row per copy, pages shuffled."""
    per_copy = -(-length // page)
    pages = per_copy * copies
    keys = torch.randn(pages, KV_HEADS, page, HEAD_DIM, device=device, dtype=torch.float16)
    values = torch.randn(pages, KV_HEADS, HEAD_DIM, page, device=device, dtype=torch.float16)
    if fp8:
        scale = torch.full((KV_HEADS,), 0.01, device=device)
        codes = [encode_e4m3(t, scale[:, None, None]) for t in (keys, values)]
        cache = PagedKV(k_cache=codes[0], v_cache=codes[1], k_scale=scale, v_scale=scale)
    else:
        cache = PagedKV(k_cache=keys, v_cache=values)
    table = torch.randperm(pages, device=device).to(torch.int32).view(copies, per_copy)
    query = torch.randn(1, 1, QUERY_HEADS, HEAD_DIM, device=device, dtype=torch.float16)
    return cache, query, table


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
