"""Every kernel compiles for every card without spilling, and stays within its budgets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from variants import (
    Variant,
    cell,
    every_attention,
    full_variants,
    quick_variants,
    tuned_variants,
)

from ingle.testing.triton_compile import ALIKE, ARCHITECTURES, CompileReport, retargeted

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"


def row_of(variant: Variant) -> list[str]:
    """The variant's cells in the table of docs, one for each architecture."""
    (row,) = [
        line for line in PAGE.read_text().splitlines() if line.startswith(f"| {variant.name} |")
    ]
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_table_of_docs_has_every_variant(arch: int) -> None:
    for variant in (*quick_variants(arch), *full_variants(arch)):
        assert len(row_of(variant)) == len(ARCHITECTURES), variant.name


def check(variant: Variant, arch: int) -> CompileReport:
    """Compiles and asserts what must hold for every kernel; the table of docs says the same."""
    report = variant.compile(arch)
    assert row_of(variant)[list(ARCHITECTURES).index(arch)] == cell(variant, report)
    assert report.spill_bytes == 0
    assert report.shared_bytes <= report.shared_limit_bytes
    assert report.loop_instructions > 0
    assert report.loop_instructions / variant.items_per_lane <= variant.most(arch)
    return report


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("index", range(len(quick_variants(80))))
def test_a_kernel_stays_within_its_budgets(index: int, arch: int) -> None:
    variant = quick_variants(arch)[index]
    report = check(variant, arch)
    if "attention" not in variant.name:
        # weights go from a 16-byte load into the tensor core: no shared-memory round trip in sight
        assert report.instructions["LDG.128"] >= 16
        assert report.shared_bytes <= 1024
        assert report.instructions["STS"] <= 24


@pytest.mark.parametrize("arch", [90])
def test_a_kernel_multiplies_on_tensor_cores(arch: int) -> None:
    report = check(quick_variants(arch)[0], arch)
    assert re.search(r"\bHMMA\.16816\.F32", report.sass)
    assert report.instructions["I2F"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("index", range(len(full_variants(80))))
def test_a_variant_stays_within_its_budgets(index: int, arch: int) -> None:
    check(full_variants(arch)[index], arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "attention native, D 192, fp16, prompt, window 1024, softcap True",
        "attention e4m3, D 192, fp16, page 16",
        "attention e4m3, D 192, bf16, window 1024, softcap True",
    ],
)
def test_what_the_assembler_would_spill_by_itself_it_does_not(name: str) -> None:
    (variant,) = [one for one in every_attention(86) if one.name == name]
    assert variant.compile(86).spill_bytes == 0
    assert replace(variant, max_registers=None).compile(86).spill_bytes > 0


def check_spills(every: Callable[[int], Sequence[Variant]], index: int) -> None:
    """Compiles the variant of that place for every architecture."""
    for archs in alike(every, index):
        for report in every(archs[0])[index].compile_alike(archs):
            name = every(archs[0])[index].name
            assert report.spill_bytes == 0, (name, report.arch)
            assert report.shared_bytes <= report.shared_limit_bytes, (name, report.arch)


IS_FULL = bool(os.environ.get("INGLE_KERNELS_FULL"))


@pytest.mark.slow
@pytest.mark.skipif(not IS_FULL, reason="make test-kernels-full")
@pytest.mark.parametrize("index", range(len(every_attention(80))))
def test_no_attention_kernel_spills(index: int) -> None:
    check_spills(every_attention, index)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(0, len(tuned_variants(80)), 1 if IS_FULL else 11))
def test_no_launch_that_a_tuner_may_choose_spills(index: int) -> None:
    check_spills(tuned_variants, index)


def alike(every: Callable[[int], Sequence[Variant]], index: int) -> list[tuple[int, ...]]:
    """The architectures, those together that are given the same code."""
    groups: dict[str, tuple[int, ...]] = {}
    for arch in ARCHITECTURES:
        constants = every(arch)[index].constants
        key = str(constants) if arch in ALIKE else str(arch)
        groups[key] = (*groups.get(key, ()), arch)
    assert sum(map(len, groups.values())) == len(ARCHITECTURES)
    return list(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(0, len(every_attention(80)), 53))
def test_what_is_compiled_once_for_several_cards_is_the_same_code(index: int) -> None:
    (archs, *_) = alike(every_attention, index)
    variant = every_attention(80)[index]
    first, *others = (variant.ptx(arch) for arch in archs)
    assert others
    for arch, ptx in zip(archs[1:], others, strict=True):
        assert ptx == retargeted(first, arch)
