"""``AffineWeight`` against its formula, and what can be done with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingle.errors import PluginError
from ingle.plugin import AffineWeight, Shard
from ingle.plugin.affine import Groups, concatenate
from ingle.plugin.affine_loader import infer_group_size
from ingle.plugin.affine_packing import pack_bits

N, K = 24, 160


def make(bits: int = 4, group_size: int = 32, seed: int = 0, **changes: Any) -> AffineWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-K // group_size)
    codes = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 1 << bits, (groups, N), dtype=torch.uint8, generator=generator)
    scales = torch.rand(groups, N, generator=generator).to(torch.float16)
    fields = {
        "bits": bits,
        "group_size": group_size,
        "in_features": K,
        "out_features": N,
        "codes": pack_bits(codes, bits),
        "scales": scales,
        "zeros": zeros,
    }
    return AffineWeight(**{**fields, **changes})


def by_formula(weight: AffineWeight) -> torch.Tensor:
    """``(q - z) * s`` element by element, in the original input order."""
    codes = weight.unpacked_codes().tolist()
    groups = weight.group_ids().tolist()
    order = range(K) if weight.input_order is None else weight.input_order.tolist()
    scales = weight.scales.float()
    result = torch.empty(N, K)
    for n in range(N):
        for k in range(K):
            g = groups[k]
            if weight.offsets is not None:
                value = codes[n][k] * scales[g, n] + weight.offsets.float()[g, n]
            else:
                value = (codes[n][k] - int(weight.integer_zeros()[g, n])) * scales[g, n]
            result[n, order[k]] = value
    return result


@pytest.mark.parametrize("bits", range(2, 9))
def test_dequantising_every_width_follows_the_formula_exactly(bits: int) -> None:
    weight = make(bits)
    assert torch.equal(weight.dequantize(), by_formula(weight))


@pytest.mark.parametrize("group_size", [16, 64, 128, K])
def test_groups_of_any_size_and_a_short_last_one_follow_the_formula(group_size: int) -> None:
    weight = make(group_size=group_size)
    assert torch.equal(weight.dequantize(), by_formula(weight))


def test_zeros_that_are_left_out_are_in_the_middle() -> None:
    assert torch.equal(make(zeros=None).dequantize(), by_formula(make(zeros=None)))
    assert make(3, zeros=None).integer_zeros().unique().tolist() == [4]


def test_float_offsets_are_added_as_they_are() -> None:
    offsets = torch.randn(5, N).to(torch.float16)
    weight = make(zeros=None, offsets=offsets)
    assert torch.equal(weight.dequantize(), by_formula(weight))
    with pytest.raises(PluginError, match="float offsets, not integer zeros"):
        weight.integer_zeros()


def test_the_input_order_is_undone_and_the_input_scale_included() -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    scale = torch.rand(K) + 0.5
    weight = make(input_order=order, input_scale=scale)
    assert torch.equal(weight.dequantize(), by_formula(weight) * scale)
    x = torch.randn(3, K).double()
    kernel_view = (x * scale)[:, order] @ weight.decode_rows(0, N).double().T
    wanted = x @ weight.dequantize().double().T
    assert (kernel_view - wanted).norm() < 1e-6 * wanted.norm()


def test_groups_of_unequal_length_follow_their_offsets() -> None:
    offsets = torch.tensor([0, 7, 7, 100, 150, K])
    scales, zeros = torch.rand(5, N), torch.randint(0, 16, (5, N), dtype=torch.uint8)
    weight = make(group_size=93, scales=scales, zeros=zeros, group_offsets=offsets)
    assert weight.group_ids().bincount(minlength=5).tolist() == [7, 0, 93, 50, 10]
    assert torch.equal(weight.dequantize(), by_formula(weight))


def test_some_rows_decode_to_the_same_rows() -> None:
    weight = make()
    assert torch.equal(weight.decode_rows(5, 17), weight.decode_rows(0, N)[5:17])


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("axis", ["in", "out"])
def test_shards_join_to_the_whole(axis: str, ranks: int, act_order: bool) -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1)) if act_order else None
    weight = make(input_order=order, input_scale=torch.rand(K) + 0.5)
    size = K if axis == "in" else N
    parts = [
        weight.shard(
            Shard(axis=axis, start=size * r // ranks, stop=size * (r + 1) // ranks, size=size)
        )
        for r in range(ranks)
    ]
    joined = torch.cat([part.dequantize() for part in parts], 1 if axis == "in" else 0)
    assert torch.equal(joined, weight.dequantize())
    assert sum(part.codes.numel() for part in parts) == weight.codes.numel()


def test_a_shard_holds_only_the_groups_it_uses() -> None:
    part = make().shard(Shard(axis="in", start=32, stop=96, size=K))
    assert part.num_groups == 2
    assert part.group_size == 32
    assert part.group_offsets is None


def test_weights_that_agree_are_joined_side_by_side() -> None:
    parts = [make(seed=1), make(seed=2, zeros=None), make(seed=3)]
    whole = concatenate(parts)
    assert whole is not None
    assert whole.out_features == 3 * N
    assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))


def test_symmetric_weights_stay_without_zeros_when_joined() -> None:
    whole = concatenate([make(zeros=None), make(zeros=None)])
    assert whole is not None
    assert whole.zeros is None


@pytest.mark.parametrize(
    "other",
    [
        make(8),
        make(group_size=80),
        make(scales=torch.rand(5, N)),
        make(zeros=None, offsets=torch.rand(5, N)),
        make(input_order=torch.arange(K)),
        make(input_scale=torch.ones(K)),
        make(out_features=N - 1),
    ],
    ids=["bits", "groups", "scales", "offsets", "order", "input scale", "padding"],
)
def test_weights_that_differ_are_not_joined(other: AffineWeight) -> None:
    assert concatenate([make(), other]) is None


def test_tensors_can_be_taken_out_and_put_back() -> None:
    weight = make(input_order=torch.arange(K).flip(0))
    copied = weight.with_tensors({n: t.clone() for n, t in weight.tensors().items()})
    assert set(weight.tensors()) == {"codes", "scales", "zeros", "input_order"}
    assert torch.equal(copied.dequantize(), weight.dequantize())
    assert weight.nbytes == N * K // 2 + 5 * N * 2 + 5 * N + K * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": torch.zeros(N, 1, dtype=torch.int32)}, r"codes is \[24, 1\]"),
        ({"zeros": torch.zeros(4, N, dtype=torch.uint8)}, r"zeros is \[4, 24\]"),
        ({"offsets": torch.zeros(5, N)}, "not both"),
        ({"scales": torch.rand(6, N), "zeros": None}, "do not cover"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make(**changes)


def test_groups_are_read_from_sorted_numbers() -> None:
    equal = Groups.of(torch.tensor([2, 2, 3, 3, 4]))
    assert (equal.first, equal.stop, equal.size, equal.offsets) == (2, 5, 2, None)
    unequal = Groups.of(torch.tensor([0, 2, 2, 2]))
    assert unequal.offsets is not None
    assert unequal.offsets.tolist() == [0, 1, 1, 4]


@pytest.mark.parametrize(
    ("in_features", "num_groups", "stated", "wanted"),
    [
        (256, 2, 128, 128),
        (192, 2, 128, 128),
        (256, 4, 128, 64),
        (256, 1, -1, 256),
        (192, 2, None, 96),
        (100, 4, None, 25),
        (200, 7, None, 32),
    ],
)
def test_the_group_size_is_the_one_that_fits(
    in_features: int, num_groups: int, stated: int | None, wanted: int
) -> None:
    assert infer_group_size(in_features, num_groups, stated) == wanted
