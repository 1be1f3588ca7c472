"""Every kernel compiles for every card without spilling, and stays within its budgets."""

from __future__ import annotations

import re

import pytest
from variants import Variant, full_variants, quick_variants

from ingle.testing.triton_compile import ARCHITECTURES, CompileReport


def check(variant: Variant, arch: int) -> CompileReport:
    """Compiles and asserts what must hold for every kernel."""
    report = variant.compile(arch)
    print(variant.name, arch, report.registers, report.shared_bytes, report.instructions)
    assert report.spill_bytes == 0
    assert report.shared_bytes <= report.shared_limit_bytes
    assert report.loop_instructions > 0
    assert report.loop_instructions / variant.items_per_lane <= variant.budget
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
