"""The kernels' instructions beside the design's. Nothing is compiled here: ``compiled`` holds the
table of docs/kernels.md to what the compiler says."""

from __future__ import annotations

import pytest
from figures import (
    ALLOWED,
    ARCHITECTURES,
    DOCS,
    FIGURES,
    compiled_cells,
    ratios,
    table,
)


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_kernel_takes_no_more_than_a_tenth_above_the_design(name: str) -> None:
    # The table of docs has two digits, so a ratio may be off by half a percent.
    for arch, ratio in zip(ARCHITECTURES, ratios(name), strict=True):
        assert ratio <= ALLOWED + 0.005, f"{name} on sm_{arch}: {ratio:.3f}"


def test_no_kernel_of_the_table_spills() -> None:
    lines = (DOCS / "kernels.md").read_text().splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.count(" / ") == 20]
    assert len(names) > 30
    for name in names:
        cells = compiled_cells(name)
        assert len(cells) == len(ARCHITECTURES)
        assert all(cell.split(" / ")[2] == "0" for cell in cells), name


def test_the_page_of_benchmarks_says_the_same() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    assert "\n".join(table()) in page
