"""How decode steps attend on a card, by its multiprocessors and as was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ingle.attention.decode_launches import TUNED_SEQUENCES, DecodeLaunches, DecodeShape
from ingle.attention.paged_triton import PagedConfig, decode_config
from ingle.plugin import DeviceInfo
from ingle.plugin.launches import TunedLaunches

CARD = DeviceInfo(type="cuda", capability=(8, 9), name="RTX 4090", multi_processors=128)
SHAPE = DecodeShape(
    num_heads=32, num_kv_heads=8, head_dim=128, block_size=256, formats=("auto", "auto"),
    dtype=torch.float16, has_softcap=False,
)  # fmt: skip


@pytest.mark.parametrize("size", TUNED_SEQUENCES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_launches_keep_a_card_busy_and_the_default_comes_first(size: int, head_dim: int) -> None:
    shape = replace(SHAPE, head_dim=head_dim)
    first, *others = shape.launches(size, 128)
    assert first == DecodeLaunches(num_sms=128)(size, 8, head_dim, 4)
    assert len({first, *others}) == len(others) + 1
    assert others
    for config in others:
        programs = size * 8 * config.splits
        assert programs >= 64
        assert config.splits == 1 or programs <= 8 * 128
        assert config.block_rows == 16


def test_a_launch_without_a_split_is_measured_where_sequences_fill_the_card() -> None:
    assert 1 in {config.splits for config in SHAPE.launches(32, 128)}
    assert 1 not in {config.splits for config in SHAPE.launches(1, 128)}


def test_what_was_measured_is_launched_for_as_many_sequences_and_fewer(tmp_path: Path) -> None:
    tuned = TunedLaunches(CARD, tmp_path)
    one, four = (SHAPE.launches(size, 128)[-1] for size in (1, 4))
    tuned.add(SHAPE.key(1), one, 1e-6)
    tuned.add(SHAPE.key(4), four, 1e-6)
    launches = DecodeLaunches(num_sms=128, measured=SHAPE.measured(tuned, 128))
    plain = DecodeLaunches(num_sms=128)
    assert launches(1, 8, 128, 4) == one
    assert launches(3, 8, 128, 4) == launches(4, 8, 128, 4) == four
    for size in (2, 5, 8, 32, 33, 100):
        assert launches(size, 8, 128, 4) == plain(size, 8, 128, 4)
    other = replace(SHAPE, formats=("fp8", "auto"))
    assert other.measured(tuned, 128) == {}
    assert other.key(1) != SHAPE.key(1) != SHAPE.key(2)


def test_every_launch_is_tried_with_the_fewest_sequences_that_get_it() -> None:
    four = PagedConfig(splits=4, block_tokens=32, num_warps=2)
    launches = DecodeLaunches(num_sms=128, measured={4: four})
    sizes = launches.batch_sizes(8, 128, 4)
    configs = [launches(size, 8, 128, 4) for size in sizes]
    every = {launches(size, 8, 128, 4) for size in range(1, 258)}
    assert set(configs) == every
    assert four in every
    assert sizes[:2] == [1, 3]
    assert DecodeLaunches(num_sms=128).batch_sizes(8, 128, 4) == [1, 4, 17]
    assert configs[0] == decode_config(128, 4, 32)
