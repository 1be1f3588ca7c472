"""Launches measured on a card, with a timer that is made up: what is picked, kept and refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import triton
from triton.errors import TritonError

from ingle.plugin import DeviceInfo
from ingle.plugin.launches import TunedLaunches, check_same, launch_seconds, measured, num_copies

CARD = DeviceInfo(
    type="cuda", capability=(8, 6), name="NVIDIA GeForce RTX 3090", multi_processors=82
)
ABSENT = replace(CARD, name="RTX 4090", is_absent=True)


@dataclass(frozen=True, kw_only=True)
class Launch:
    block: int = 32
    prefetch: bool = True


CHOICES = [Launch(), Launch(block=16), Launch(block=64), Launch(block=64, prefetch=False)]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedLaunches:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path))
    return TunedLaunches(CARD)


def test_the_fastest_is_picked_and_what_fails_is_left_out(tuned: TunedLaunches) -> None:
    tried: list[Launch] = []

    def seconds(launch: Launch) -> float:
        tried.append(launch)
        if launch.block == 16:
            raise TritonError("out of resources")
        return 1e-6 if launch == CHOICES[3] else 2e-6

    line = tuned.tune("a key", [*CHOICES, CHOICES[0]], seconds)
    assert tried == CHOICES  # once each
    assert tuned.get("a key", CHOICES) == CHOICES[3]
    assert line == f"a key: {CHOICES[3]}, 1.0 us"
    assert Launch(block=16) not in measured(CHOICES, seconds)


def test_of_equals_the_first_is_kept_and_without_any_it_says_so(tuned: TunedLaunches) -> None:
    tuned.tune("a key", CHOICES, lambda launch: 1.0)
    assert tuned.get("a key", CHOICES) == CHOICES[0]

    def fail(launch: Launch) -> float:
        raise RuntimeError("no card")

    with pytest.raises(RuntimeError, match="none of 4 launches ran: a key"):
        tuned.tune("a key", CHOICES, fail)


def test_what_was_measured_is_kept_per_card_and_version(
    tuned: TunedLaunches, tmp_path: Path
) -> None:
    assert tuned.get("a key", CHOICES) is None
    tuned.add("a key", CHOICES[1], 3e-6)
    tuned.add("another", CHOICES[2], 4e-6)
    assert TunedLaunches(CARD).get("a key", CHOICES) == CHOICES[1]
    assert tuned.get("a third", CHOICES) is None
    assert TunedLaunches(replace(CARD, name="NVIDIA H200")).get("a key", CHOICES) is None
    assert tuned.path.parent == tmp_path / "launches"
    assert tuned.path.name == f"NVIDIA-GeForce-RTX-3090-triton-{triton.__version__}.json"
    entries = json.loads(tuned.path.read_text())
    assert entries["a key"] == {**asdict(CHOICES[1]), "us": 3.0}
    assert len(entries) == 2
    assert len(list(tuned.path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null"]
    + [
        json.dumps({"a key": entry})
        for entry in (
            7,
            {},
            {"block": 48, "prefetch": True},
            {"block": 32, "prefetch": "yes"},
            {"block": 32},
            {"block": 32, "prefetch": True, "more": 1},
        )
    ],
)
def test_a_file_that_says_what_cannot_be_counts_as_nothing(
    tuned: TunedLaunches, content: str
) -> None:
    tuned.path.parent.mkdir()
    tuned.path.write_text(content)
    assert tuned.get("a key", CHOICES) is None


def test_on_an_absent_card_every_launch_is_called_once_and_nothing_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path))
    called: list[Launch] = []

    def seconds(launch: Launch) -> float:
        copies = num_copies(ABSENT, 1)
        return launch_seconds(ABSENT, [lambda: called.append(launch)] * copies)

    assert TunedLaunches(ABSENT).tune("a key", CHOICES, seconds) == "a key: 4 launches compiled"
    assert called == CHOICES
    assert not list(tmp_path.iterdir())


def test_a_launch_that_gives_something_else_is_refused() -> None:
    wanted = torch.randn(64)
    check_same((wanted * 1.001).half(), wanted)
    for wrong in (wanted * 1.1, torch.zeros(64), torch.full((64,), float("nan"))):
        with pytest.raises(ValueError, match="the launch is wrong by"):
            check_same(wrong, wanted)
