"""Paged attention in Triton's interpreter against the reference, and against torch's own."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_case import BOUNDS, Case, pairwise, problem
from torch.nn.functional import scaled_dot_product_attention

from ingle.attention.paged_triton import PagedConfig, decode_config, paged_attention, paged_cache

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
GROUPS = tuple(range(1, 9))
WINDOWS = (None, 1, 40, 300)
SOFTCAPS = (None, 5.0)
PAIRS = ("auto", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "int8,int4", "auto,fp8_e4m3")
CHOICES: dict[str, tuple[Any, ...]] = {
    "head_dim": HEAD_DIMS,
    "group": GROUPS,
    "window": WINDOWS,
    "softcap": SOFTCAPS,
    "length": (1, 17, 64, 257, 300),
    "new": (1, 1, 5, 24),
    "block_size": (16, 256),
    "formats": PAIRS,
    "dtype": (torch.float16, torch.bfloat16),
    "splits": (1, 4),
}
FULL = "INGLE_KERNELS_FULL"
"""Set by ``make test-kernels-full``: every combination instead of every pair."""


def case_of(values: dict[str, Any]) -> Case:
    new = min(values["new"], values["length"])
    return Case(**{**values, "new": new, "heads": 1 + values["group"] % 2})


def name_of(case: Case) -> str:
    parts = [f"D{case.head_dim}", f"G{case.group}", f"L{case.length}", f"new{case.new}"]
    parts += [f"page{case.block_size}", case.formats, str(case.dtype).removeprefix("torch.")]
    parts += [f"window{case.window}"] if case.window else []
    return "-".join(parts + (["softcap"] if case.softcap else []))


@pytest.mark.parametrize("case", [case_of(one) for one in pairwise(CHOICES)], ids=name_of)
def test_every_pair_of_choices_equals_the_reference(case: Case) -> None:
    assert problem(case).error() < case.bound


@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=64, group=3, length=3000, block_size=256, splits=8),
        Case(head_dim=128, group=4, length=3000, block_size=16, formats="fp8_e4m3", splits=8),
        Case(head_dim=96, group=2, length=3000, new=20, block_size=256, window=500),
    ],
    ids=name_of,
)
def test_three_thousand_cached_tokens_equal_the_reference(case: Case) -> None:
    assert problem(case).error() < case.bound


def full_cases() -> list[Case]:
    """Every head size, ratio, window and soft-cap at 20 lengths, the rest taken in turn."""
    lengths = itertools.cycle((1, 2, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 511, 777, 1000))
    news, sizes = itertools.cycle((1, 1, 2, 7, 64, 150, 1)), itertools.cycle((16, 256))
    dtypes = itertools.cycle((torch.float16, torch.bfloat16, torch.float16))
    pairs, far = itertools.cycle(PAIRS), itertools.cycle((1500, 2048, 2999, 3000))
    found = []
    for number, (dim, group, window, softcap) in enumerate(
        itertools.product(HEAD_DIMS, GROUPS, WINDOWS, SOFTCAPS)
    ):
        length = next(far) if number % 8 == 7 else next(lengths)
        values = {"head_dim": dim, "group": group, "window": window, "softcap": softcap}
        values |= {"length": length, "new": next(news), "block_size": next(sizes)}
        values |= {"formats": next(pairs), "dtype": next(dtypes), "splits": 1 + number % 5}
        found.append(case_of(values))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(FULL), reason="minutes long: make test-kernels-full")
@pytest.mark.parametrize("case", full_cases(), ids=name_of)
def test_every_combination_equals_the_reference(case: Case) -> None:
    assert problem(case).error() < case.bound


@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=64, group=3, formats="fp8_e4m3", dtype=torch.bfloat16, measured=True),
        Case(head_dim=80, group=2, new=20, formats="fp8_e5m2,auto", measured=True),
        Case(head_dim=64, formats="fp8_e4m3,int4", window=40, softcap=5.0, measured=True),
    ],
    ids=name_of,
)
def test_caches_that_were_measured_equal_the_reference(case: Case) -> None:
    one = problem(case)
    assert one.cache.k_store.rotation is not None
    assert one.error() < case.bound


@pytest.mark.parametrize("new", [1, 3])
def test_the_native_cache_equals_torch_in_float64(new: int) -> None:
    case = Case(head_dim=64, group=4, length=150, new=new, heads=2)
    one = problem(case)
    found = one.kernel()
    for span in one.batch.spans:
        keys, values = (side.double().repeat_interleave(4, 0) for side in one.cache.read(span))
        rows = one.query[span.start : span.stop].double().transpose(0, 1)
        mask = torch.ones(new, span.seq_len, dtype=torch.bool).tril(span.seq_len - new)
        wanted = scaled_dot_product_attention(rows, keys, values, mask).transpose(0, 1)
        error = (found[span.start : span.stop].double() - wanted).norm() / wanted.norm()
        assert error < BOUNDS[torch.float16]


@pytest.mark.parametrize("formats", ["auto", "fp8_e4m3", "int8", "int4"])
def test_garbage_past_the_end_of_a_sequence_does_not_matter(formats: str) -> None:
    one = problem(Case(head_dim=32, group=2, length=70, block_size=64, formats=formats))
    clean = one.kernel()
    last = one.batch.spans[0].block_table[-1]
    for store in (one.cache.k_store, one.cache.v_store):
        for tensor in store.tensors().values():
            tensor[last, :, 6:] = float("nan") if tensor.is_floating_point() else 0x7F
    assert torch.equal(one.kernel(), clean)


@pytest.mark.parametrize("formats", ["auto", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_a_cached_nan_is_seen_in_the_output(formats: str) -> None:
    one = problem(Case(head_dim=32, group=2, length=40, formats=formats))
    table = one.batch.spans[0].block_table
    slot = torch.tensor([table[0] * 16 + 3])
    bad = torch.full((1, 1, 32), float("nan"), dtype=torch.float16)
    one.cache.write(bad, torch.zeros(1, 1, 32).half(), slot)
    found = one.kernel()
    assert found[0].isnan().all()
    assert not found[1].isnan().any()


def test_an_empty_sequence_gives_zeros() -> None:
    one = problem(Case(head_dim=32, length=16))
    one.rows.seq_lens[0] = 0
    found = one.kernel()
    assert not found[0].any()
    assert found[1].any()


def test_the_same_problem_gives_the_same_bits_for_every_order_of_its_sequences() -> None:
    one = problem(Case(head_dim=64, group=3, length=200, formats="int8"))
    rows = one.rows
    turned = replace(
        rows,
        block_table=rows.block_table.flip(0),
        seq_lens=rows.seq_lens.flip(0),
        row_starts=rows.row_starts.flip(0),
    )
    assert torch.equal(replace(one, rows=turned).kernel(), one.kernel())


def test_what_the_kernel_cannot_serve_is_declined_with_the_value() -> None:
    one = problem(Case(head_dim=32))
    pages, config, softmax = paged_cache(one.cache), decode_config(32, 2, 1), one.case.softmax
    assert pages is not None

    def attend(query: torch.Tensor, how: PagedConfig = config, **changes: Any) -> None:
        rows = replace(one.rows, **changes)
        paged_attention(query, pages, rows, how, softmax, out=torch.empty_like(query))

    with pytest.raises(ValueError, match="float32"):
        attend(one.query.float())
    with pytest.raises(ValueError, match="head size 40"):
        attend(torch.zeros(2, 2, 40).half())
    with pytest.raises(ValueError, match="3 query heads"):
        paged_attention(
            torch.zeros(2, 3, 32).half(),
            replace(pages, num_kv_heads=2),
            one.rows,
            config,
            softmax,
            out=torch.zeros(2, 3, 32).half(),
        )
    with pytest.raises(ValueError, match="block_rows 16"):
        attend(one.query, replace(config, splits=4), max_new=9)
