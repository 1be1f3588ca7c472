"""One token each of several sequences in one call, against torch's kernel sequence by sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from ingle.attention import row_attention
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cpu import PagedCPUAttention
from ingle.attention.row_attention import RowAttention
from ingle.builtin.kv_int_formats import Int4KVCache
from ingle.builtin.kv_native import NativeKVCache
from ingle.engine.background_compiler import BackgroundCompiler
from ingle.engine.function_compiler import FunctionCompiler
from ingle.plugin import DeviceInfo, KVCacheFormat, KVCacheGeometry

SCALE = 0.2
SIDES: tuple[Literal["k"], Literal["v"]] = ("k", "v")
LENGTHS = (1, 16, 17, 40, 300)
MANY = 40
"""Blocks of the cache."""


def filled(block: int, form: KVCacheFormat, size: int = 80) -> LayerCache:
    torch.manual_seed(0)
    k, v = (
        form.allocate(
            KVCacheGeometry(
                side=side, num_kv_heads=2, head_dim=size, block_size=block, dtype=torch.bfloat16
            ),
            MANY,
            DeviceInfo(type="cpu"),
        )
        for side in SIDES
    )
    cache = LayerCache(k_format=form, v_format=form, k_store=k, v_store=v)
    rows = (torch.randn(MANY * block, 2, size).bfloat16() for _ in SIDES)
    cache.write(*rows, torch.arange(MANY * block))
    return cache


def batch(block: int, *, num_new: int = 1) -> ForwardBatch:
    """Sequences of ``LENGTHS`` tokens in blocks of their own, in no order."""
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(1)).tolist()
    spans, start = [], 0
    for length in LENGTHS:
        used = -(-length // block)
        new = min(num_new, length)
        spans.append(
            SequenceSpan(
                start=start,
                stop=start + new,
                seq_len=length,
                block_table=tuple(order.pop() for _ in range(used)),
                first_block=None,
            )
        )
        start += new
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(token_ids=none, positions=none, slot_mapping=none, spans=tuple(spans))


def counted(rows: RowAttention) -> list[int]:
    """Lets the function run as written, as if compiled; what it is given counts itself."""
    calls: list[int] = []

    def run(tensors: list[torch.Tensor]) -> None:
        assert all(tensor.is_contiguous() for tensor in tensors)
        calls.append(tensors[0].shape[0])
        row_attention.attend_rows(*tensors)

    rows.function.use(run)
    return calls


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_are_those_of_the_sequences_alone(groups: int, block: int) -> None:
    cache, step = filled(block, NativeKVCache()), batch(block)
    query = torch.randn(len(LENGTHS) + 3, 2 * groups, 80).bfloat16()
    wanted = PagedCPUAttention(SCALE)(query[: len(LENGTHS)], cache, step)
    rows = RowAttention(SCALE, groups, 80)
    calls = counted(rows)
    found = PagedCPUAttention(SCALE, rows=rows)(query, cache, step)
    assert calls == [len(LENGTHS)]
    assert found.shape == (len(LENGTHS) + 3, 2 * groups * 80)
    error = (found[: len(LENGTHS)].double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 5e-3
    assert found.isfinite().all()


def test_what_lies_behind_a_sequences_end_reaches_no_row() -> None:
    cache, step = filled(64, NativeKVCache()), batch(64)
    query = torch.randn(len(LENGTHS), 6, 80).bfloat16()
    rows = RowAttention(SCALE, 3, 80)
    counted(rows)
    wanted = PagedCPUAttention(SCALE, rows=rows)(query, cache, step)
    for one in step.spans:
        block, used = one.block_table[-1], (one.seq_len - 1) % 64 + 1
        slots = torch.arange(block * 64 + used, (block + 1) * 64)
        nothing = torch.full((len(slots), 2, 80), torch.nan).bfloat16()
        cache.write(nothing, nothing, slots)
    assert torch.equal(PagedCPUAttention(SCALE, rows=rows)(query, cache, step), wanted)


def test_what_it_does_not_know_goes_the_other_way() -> None:
    rows = RowAttention(SCALE, 3, 80)
    calls = counted(rows)
    query = torch.randn(len(LENGTHS), 6, 80).bfloat16()
    plain = filled(16, NativeKVCache())
    PagedCPUAttention(SCALE, 100, rows=rows)(query, plain, batch(16))  # a window
    wide = torch.randn(1 + 2 * (len(LENGTHS) - 1), 6, 80).bfloat16()
    PagedCPUAttention(SCALE, rows=rows)(wide, plain, batch(16, num_new=2))
    PagedCPUAttention(SCALE, rows=rows)(query[..., :64], filled(16, Int4KVCache(), 64), batch(16))
    assert not calls
    PagedCPUAttention(SCALE, 300, rows=rows)(query, plain, batch(16))  # a window of all
    assert calls == [len(LENGTHS)]


def test_layers_share_one_table() -> None:
    rows = RowAttention(SCALE, 3, 80)
    counted(rows)
    step = batch(16)
    query = torch.randn(len(LENGTHS), 6, 80).bfloat16()
    for _ in range(2):
        PagedCPUAttention(SCALE, rows=rows)(query, filled(16, NativeKVCache()), step)
        first = step.made.setdefault("first", step.made[row_attention.RowTable.name])
        assert step.made[row_attention.RowTable.name] is first


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_it_gives_what_the_written_function_does(tmp_path: Path) -> None:
    rows = RowAttention(SCALE, 3, 80)
    BackgroundCompiler((FunctionCompiler((rows.function,), tmp_path),)).compile_now()
    assert rows.function.is_compiled  # loading compares it
    cache, step = filled(64, NativeKVCache()), batch(64)
    query = torch.randn(len(LENGTHS), 6, 80).bfloat16()
    wanted = PagedCPUAttention(SCALE)(query, cache, step)
    found = PagedCPUAttention(SCALE, rows=rows)(query, cache, step)
    assert (found.double() - wanted.double()).norm() / wanted.double().norm() < 5e-3
