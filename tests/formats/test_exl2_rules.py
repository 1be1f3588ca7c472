"""What EXL2 claims, and every way a file can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ingle.errors import CheckpointError
from ingle.plugin import Shard
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes

GROUPS = ((5, 32), (4, 64), (4, 32))
INPUTS, OUTPUTS = 128, 64
MODULE = {"prefix": "lin", "in_features": INPUTS, "out_features": OUTPUTS}


def linear(
    groups: tuple[tuple[int, int], ...] = GROUPS, outputs: int = OUTPUTS, name: str = "lin"
) -> dict[str, torch.Tensor]:
    """The five tensors of a random linear."""
    generator = torch.Generator().manual_seed(0)
    words, pairs, rows = [], [], 0
    for bits, size in groups:
        codes = torch.randint(0, 1 << bits, (size, outputs), generator=generator)
        pairs += [bits, sum(len(w) for w in words)]
        words.append(pack_codes(codes, bits))
        rows += size
    scales = torch.randint(0, 16, (len(groups), outputs), generator=generator)
    return {
        f"{name}.q_weight": torch.cat(words),
        f"{name}.q_scale": pack_scale_codes(scales),
        f"{name}.q_scale_max": torch.rand(len(groups), generator=generator).half(),
        f"{name}.q_groups": torch.tensor(pairs, dtype=torch.int16),
        f"{name}.q_invperm": torch.randperm(rows, generator=generator).int(),
    }


def test_an_old_checkpoint_without_a_config_entry_is_claimed(
    write_folder: Callable[..., Any],
) -> None:
    detection = Exl2Format().detect(write_folder(linear()).info)
    assert detection is not None
    assert detection.priority > 0
    assert "does not say so" in detection.reason


def test_the_config_alone_is_claimed_below_everyone_and_refused_with_a_remedy(
    write_folder: Callable[..., Any],
) -> None:
    folder = write_folder({"lin.weight": torch.zeros(8, 8)}, {"quant_method": "exl2"})
    detection = Exl2Format().detect(folder.info)
    assert detection is not None
    assert detection.priority < 0
    with pytest.raises(CheckpointError, match=r"none of its 1 tensors ends in \.q_weight"):
        Exl2Format().open(folder.info)


@pytest.mark.parametrize(
    "tensors",
    [
        {"lin.weight": torch.zeros(64, 64)},
        {"lin.qweight": torch.zeros(8, 64, dtype=torch.int32), "lin.qzeros": torch.zeros(1, 8)},
        {"lin.q_weight": torch.zeros(8, 64, dtype=torch.int32), "lin.q_scale": torch.zeros(1, 8)},
        {"lin.trellis": torch.zeros(8, 8, 48, dtype=torch.int16), "lin.suh": torch.zeros(128)},
    ],
    ids=["dense", "gptq or awq", "q_weight of mlc", "exl3"],
)
@pytest.mark.parametrize("method", [None, "awq", "gptq", "exl3", "bitsandbytes"])
def test_checkpoints_of_others_are_declined(
    tensors: Mapping[str, torch.Tensor], method: str | None, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(tensors, {"quant_method": method} if method else None)
    assert Exl2Format().detect(folder.info) is None


def test_tensors_beat_a_config_that_names_another_format(
    write_folder: Callable[..., Any],
) -> None:
    folder = write_folder(linear(), {"quant_method": "gptq", "bits": 4})
    assert Exl2Format().detect(folder.info) is not None


def test_a_stored_q_perm_is_ignored_but_belongs_to_the_linear(
    write_folder: Callable[..., Any],
) -> None:
    tensors = linear()
    wrong = torch.zeros(INPUTS, dtype=torch.int16)
    stored = {**tensors, "lin.q_perm": wrong}
    folder = write_folder(stored)
    loader = folder.open(Exl2Format())
    assert set(loader.tensor_names("lin")) == {*stored}
    assert loader.packed_bytes("lin") == sum(t.numel() * t.element_size() for t in stored.values())
    plain = write_folder(tensors)
    expected = plain.load(plain.open(Exl2Format()), MODULE).dequantize()
    assert torch.equal(folder.load(loader, MODULE).dequantize(), expected)


@pytest.mark.parametrize("suffix", ["q_scale", "q_scale_max", "q_groups", "q_invperm"])
def test_a_missing_tensor_is_refused_by_name(suffix: str, write_folder: Callable[..., Any]) -> None:
    tensors = linear() | linear(name="other")
    del tensors[f"lin.{suffix}"]
    folder = write_folder(tensors)
    assert Exl2Format().detect(folder.info) is not None
    with pytest.raises(CheckpointError, match=rf"lin\.{suffix} is missing"):
        Exl2Format().open(folder.info)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("q_scale_max", lambda t: t.float(), "q_scale_max has type F32, EXL2 wants F16"),
        ("q_weight", lambda t: t.long(), "q_weight has type I64"),
        ("q_weight", lambda t: t[:, 0], "q_weight has shape .* wants 2 dimensions"),
        ("q_weight", lambda t: t[:, :60], "q_weight has 60 columns"),
        ("q_scale", lambda t: t[:, :4], "q_scale has shape .3, 4., but 3 groups and 64 outputs"),
        ("q_groups", lambda t: t[:4], "q_groups has shape .4., but 3 groups"),
        ("q_invperm", lambda t: t[:120], "q_invperm has 120 entries"),
    ],
)
def test_a_wrong_shape_or_type_is_refused_by_name(
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
    write_folder: Callable[..., Any],
) -> None:
    tensors = linear()
    tensors[f"lin.{suffix}"] = change(tensors[f"lin.{suffix}"])
    with pytest.raises(CheckpointError, match=rf"lin\.{message}"):
        Exl2Format().open(write_folder(tensors).info)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([7, 0, 4, 5, 4, 13], "group 0 has 7 bits"),
        ([4, 0, 5, 4, 4, 14], "bit widths must not increase"),
        ([5, 1, 4, 5, 4, 13], "the first group must start at word 0, got .1."),
        ([5, 0, 4, 10, 4, 5], "group 1 takes -5 words"),
        ([5, 0, 4, 5, 4, 5], "group 1 takes 0 words"),
        ([5, 0, 4, 5, 4, 14], "group 1 takes 9 words of 4-bit"),
        ([5, 0, 5, 5, 5, 10], "group 2 takes 7 words of 5-bit"),
        ([5, 0, 3, 5, 3, 14], "the groups hold 160 rows, but q_invperm has 128"),
    ],
)
def test_groups_that_break_a_rule_are_refused_by_name(
    pairs: list[int], message: str, write_folder: Callable[..., Any]
) -> None:
    tensors = linear()
    tensors["lin.q_groups"] = torch.tensor(pairs, dtype=torch.int16)
    folder = write_folder(tensors)
    with pytest.raises(CheckpointError, match=rf"lin\.q_groups: ({message})"):
        folder.load(folder.open(Exl2Format()), MODULE)


@pytest.mark.parametrize("broken", ["repeated", "negative", "too large"])
def test_an_order_that_is_no_permutation_is_refused(
    broken: str, write_folder: Callable[..., Any]
) -> None:
    tensors = linear()
    order = tensors["lin.q_invperm"].clone()
    order[3] = {"repeated": order[4], "negative": -1, "too large": INPUTS}[broken]
    folder = write_folder({**tensors, "lin.q_invperm": order})
    with pytest.raises(CheckpointError, match=r"lin\.q_invperm is not a permutation"):
        folder.load(folder.open(Exl2Format()), MODULE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(
    value: float, write_folder: Callable[..., Any]
) -> None:
    tensors = linear()
    tensors["lin.q_scale_max"] = torch.tensor([1.0, value, 1.0]).half()
    folder = write_folder(tensors)
    with pytest.raises(CheckpointError, match=r"lin\.q_scale_max has values that are not finite"):
        folder.load(folder.open(Exl2Format()), MODULE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 256}, r"q_invperm has 128 entries, the model wants 256"),
        ({"out_features": 72}, r"q_weight has 64 columns, the model wants 72"),
        ({"name": "missing"}, r"missing is not an EXL2 linear"),
    ],
)
def test_a_linear_of_another_size_or_name_is_refused(
    changes: dict[str, Any], message: str, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(linear())
    with pytest.raises(CheckpointError, match=message):
        folder.load(folder.open(Exl2Format()), MODULE, **changes)


def test_padding_of_128_outputs_or_more_is_refused(write_folder: Callable[..., Any]) -> None:
    folder = write_folder(linear(outputs=256))
    loader = folder.open(Exl2Format())
    assert folder.load(loader, MODULE, out_features=129).out_features == 129
    with pytest.raises(CheckpointError, match="at most 127 of padding"):
        folder.load(loader, MODULE, out_features=128)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_the_outputs_join_to_the_whole(
    ranks: int, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(linear())
    loader = folder.open(Exl2Format())
    size = OUTPUTS // ranks
    parts = [
        folder.load(
            loader,
            MODULE,
            shard=Shard(axis="out", start=rank * size, stop=(rank + 1) * size, size=OUTPUTS),
        )
        for rank in range(ranks)
    ]
    assert [part.out_features for part in parts] == [size] * ranks
    whole = folder.load(loader, MODULE).dequantize()
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole)


def test_the_last_shard_of_a_padded_linear_ends_on_a_whole_word(
    write_folder: Callable[..., Any],
) -> None:
    folder = write_folder(linear())
    loader = folder.open(Exl2Format())
    shard = Shard(axis="out", start=24, stop=50, size=50)
    part = folder.load(loader, MODULE, out_features=50, shard=shard)
    assert (part.out_features, part.stored_out_features) == (26, 32)
    whole = folder.load(loader, MODULE).dequantize()
    assert torch.equal(part.dequantize(), whole[24:56])


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (Shard(axis="in", start=0, stop=64, size=128), "permutes input features"),
        (Shard(axis="out", start=4, stop=64, size=64), "do not fall on multiples of 8"),
        (Shard(axis="out", start=0, stop=28, size=64), "do not fall on multiples of 8"),
    ],
)
def test_other_shards_are_declined_with_a_reason_and_never_loaded(
    shard: Shard, reason: str, write_folder: Callable[..., Any]
) -> None:
    folder = write_folder(linear())
    loader = folder.open(Exl2Format())
    with pytest.raises(CheckpointError, match=reason):
        folder.load(loader, MODULE, shard=shard)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_matrix_of_one_width_loads(bits: int, write_folder: Callable[..., Any]) -> None:
    folder = write_folder(linear(groups=((bits, 128),)))
    weight = folder.load(folder.open(Exl2Format()), MODULE)
    assert weight.dequantize().unique().numel() > 1
    assert weight.nbytes >= INPUTS * OUTPUTS * bits // 8
