"""One attention problem over a paged cache, solved by the kernel and by the reference."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from interpreted_device import CARD

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_triton import (
    COUNTER_BYTES,
    PagedConfig,
    PagedRows,
    Softmax,
    decode_config,
    paged_attention,
    paged_cache,
    prompt_config,
    workspace_bytes,
)
from ingle.attention.reference import ReferenceAttention
from ingle.builtin.kv_int_formats import Int4KVCache, Int8KVCache
from ingle.builtin.kv_native import NativeKVCache
from ingle.plugin import KVCacheFormat, KVCacheGeometry
from ingle_kv_fp8.format import Fp8E4M3Format, Fp8E5M2Format

FORMATS: Mapping[str, type[KVCacheFormat]] = {
    form.name: form
    for form in (NativeKVCache, Int8KVCache, Int4KVCache, Fp8E4M3Format, Fp8E5M2Format)
}
BOUNDS = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Relative Frobenius error: the kernel multiplies in 16 bit, the reference in float32."""
INT4_FACTOR = 1.5
"""On the bound for int4: the kernel rounds a turned query, and a code times its scale, to 16 bit,
which the reference keeps in float32. By the sizes of roundings (each 2**-11 / 3**0.5 at most, of
float16) that is 4.5e-4 where formats of 16 bit have 2.8e-4."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``length`` cached tokens, ``new`` of them this step's; a second, shorter sequence beside."""

    head_dim: int
    group: int = 2
    length: int = 100
    new: int = 1
    block_size: int = 16
    formats: str = "auto"
    dtype: torch.dtype = torch.float16
    window: int | None = None
    softcap: float | None = None
    splits: int = 3
    heads: int = 1
    measured: bool = False
    """Whether the formats have seen what they will be given, as at the engine's start."""

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype] * (INT4_FACTOR if "int4" in self.formats else 1)

    @property
    def softmax(self) -> Softmax:
        return Softmax(scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap)


@dataclass
class Problem:
    case: Case
    query: torch.Tensor
    cache: LayerCache
    batch: ForwardBatch
    rows: PagedRows

    def reference(self) -> torch.Tensor:
        """In float32, on what the formats' ``gather`` gives."""
        softmax = self.case.softmax
        attend = ReferenceAttention(softmax.scale, softmax.window, softmax.softcap)
        return attend(self.query.float(), self.cache, self.batch).view(self.query.shape)

    def config(self) -> PagedConfig:
        case = self.case
        if case.new > 1:
            is_large = "int4" in case.formats
            return prompt_config(case.head_dim, case.block_size, is_large=is_large)
        return decode_config(case.head_dim, case.group, case.splits)

    def kernel(self, config: PagedConfig | None = None) -> torch.Tensor:
        """Twice: the second launch relies on the counters that the first one left."""
        pages, config = paged_cache(self.cache), config or self.config()
        assert pages is not None
        turn, back = self.cache.k_store.rotation, self.cache.v_store.rotation
        query = self.query if turn is None else (self.query.float() @ turn).to(self.query.dtype)
        size = workspace_bytes(query, pages, self.rows, config)
        workspace = torch.zeros(size, dtype=torch.uint8)
        out = torch.full_like(query, float("nan"))
        for _ in range(2):
            paged_attention(
                query, pages, self.rows, config, self.case.softmax, out=out, workspace=workspace
            )
        assert not workspace[:COUNTER_BYTES].any(), "counters must be left at zero"
        return out.float() if back is None else out.float() @ back.T

    def error(self) -> float:
        wanted = self.reference()
        return float((self.kernel() - wanted).norm() / wanted.norm())


def _cache(case: Case, num_blocks: int) -> LayerCache:
    k_name, _, v_name = case.formats.partition(",")
    k_form, v_form = FORMATS[k_name](), FORMATS[v_name or k_name]()
    k, v = (
        KVCacheGeometry(
            side=side,
            num_kv_heads=case.heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            dtype=case.dtype,
        )
        for side in ("k", "v")
    )
    stores = k_form.allocate(k, num_blocks, CARD), v_form.allocate(v, num_blocks, CARD)
    return LayerCache(k_format=k_form, v_format=v_form, k_store=stores[0], v_store=stores[1])


def problem(case: Case, seed: int = 0) -> Problem:
    """Random keys, values and queries, blocks in any order."""
    torch.manual_seed(seed)
    size, lengths = case.block_size, [case.length, max(case.new, case.length // 3)]
    counts = [-(-length // size) for length in lengths]
    free = (torch.randperm(sum(counts)) + 1).tolist()
    cache = _cache(case, len(free) + 1)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    spans, row = [], 0
    for length, table in zip(lengths, tables, strict=True):
        slots = torch.tensor([table[at // size] * size + at % size for at in range(length)])
        token = (length, case.heads, case.head_dim)
        key, value = torch.randn(token).to(case.dtype), torch.randn(token).to(case.dtype)
        if case.measured and not spans:
            cache.k_format.observe(cache.k_store, key)
            cache.v_format.observe(cache.v_store, value)
        cache.write(key, value, slots)
        spans.append(
            SequenceSpan(
                start=row,
                stop=row + case.new,
                seq_len=length,
                block_table=table,
                first_block=None,
            )
        )
        row += case.new
    query = torch.randn(row, case.heads * case.group, case.head_dim).to(case.dtype)
    nothing = torch.zeros(row, dtype=torch.int64)
    return Problem(
        case=case,
        query=query,
        cache=cache,
        batch=ForwardBatch(
            token_ids=nothing, positions=nothing, slot_mapping=nothing, spans=tuple(spans)
        ),
        rows=_rows(spans, max(counts), case.new),
    )


def _rows(spans: Sequence[SequenceSpan], width: int, new: int) -> PagedRows:
    tables = [[*span.block_table, *(0 for _ in range(width))][:width] for span in spans]
    return PagedRows(
        block_table=torch.tensor(tables, dtype=torch.int32),
        seq_lens=torch.tensor([span.seq_len for span in spans], dtype=torch.int32),
        row_starts=torch.tensor([span.start for span in spans], dtype=torch.int32),
        new_lens=torch.full((len(spans),), new, dtype=torch.int32),
        max_new=new,
    )


def pairwise(choices: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases in which every two values of different choices meet at least once; greedily few."""
    names, draw = list(choices), random.Random(seed)
    pairs = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in range(len(choices[a]))
        for y in range(len(choices[b]))
    }

    def met(case: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {
            (a, case[a], b, case[b]) for i, a in enumerate(names) for b in names[i + 1 :]
        } & pairs

    found = []
    while pairs:
        a, x, b, y = min(pairs)
        tries = [
            {name: draw.randrange(len(values)) for name, values in choices.items()} | {a: x, b: y}
            for _ in range(30)
        ]
        best = max(tries, key=lambda case: len(met(case)))
        pairs -= met(best)
        found.append({name: choices[name][index] for name, index in best.items()})
    return found
