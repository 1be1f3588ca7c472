"""What the design counted in the main loop of its sketches (KERNELS.md), beside what Ingle's
kernels take; also prints the table of docs/benchmarks.md from the one of docs/kernels.md.

python tests/kernels/figures.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
ARCHITECTURES = (80, 86, 89, 90, 120)
ALLOWED = 1.1
"""Times the design's figure."""


def _on(
    ampere: float, hopper: float, blackwell: float, ada: float | None = None
) -> dict[int, float]:
    return {86: ampere, 90: hopper, 120: blackwell} | ({} if ada is None else {89: ada})


FIGURES: Mapping[str, Mapping[int, float]] = {
    "W4 1-8 rows": _on(1.88, 1.97, 1.83),
    "W4 1-8 rows, bf16": _on(2.5, 2.5, 2.5),
    "W4 16 rows": _on(2.2, 2.4, 2.1),
    "W4 32 rows": _on(2.6, 2.6, 2.6),
    "EXL2 2 bit, g128": _on(1.7, 1.8, 1.8),
    "EXL2 3 bit, g128": _on(2.9, 2.9, 2.9),
    "EXL2 4 bit, g128": _on(1.8, 1.8, 1.9),
    "EXL2 5 bit, g128": _on(2.9, 3.0, 3.0),
    "EXL2 6 bit, g128": _on(2.9, 3.0, 3.0),
    "EXL2 8 bit, g128": _on(2.2, 2.2, 2.2),
    "EXL2 3 bit, g32": _on(3.3, 3.3, 3.3),
    "attention native, D 128, fp16": _on(2.1, 2.3, 2.3),
    "attention e4m3, D 128, fp16": _on(4.8, 3.4, 3.3, ada=3.3),
    "attention native, D 128, fp16, page 16": _on(3.5, 3.5, 3.5),
    "attention e4m3, D 128, fp16, page 16": _on(7.1, 5.3, 5.6, ada=5.5),
}
"""Sections 3 and 4.5: per weight, or per element of keys and values with the launch that Ingle
makes (64 tokens, 4 warps; where the design gives a range, that launch is its upper end). There are
no figures for sm_80 and few for sm_89: there sm_86's count, whose code is the same but for e4m3."""


def figure_of(name: str, arch: int) -> float | None:
    """The design's figure for a variant, if it has one."""
    figures = FIGURES.get(name)
    return None if figures is None else figures.get(arch, figures[86])


def compiled_cells(name: str) -> list[str]:
    """A variant's cells in the table of docs/kernels.md, one for each architecture."""
    lines = (DOCS / "kernels.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


def ratios(name: str) -> list[float]:
    """Ours by the design's figure, on each architecture."""
    found = []
    for arch, cell in zip(ARCHITECTURES, compiled_cells(name), strict=True):
        figure = figure_of(name, arch)
        assert figure is not None
        found.append(float(cell.split("/")[-1]) / figure)
    return found


def table() -> list[str]:
    """Markdown: a row per figure, ours | KERNELS.md | ratio per architecture."""
    lines = ["| kernel | " + " | ".join(f"sm_{arch}" for arch in ARCHITECTURES) + " |"]
    lines.append("|---|" + "---|" * len(ARCHITECTURES))
    for name in FIGURES:
        cells = [
            f"{cell.split('/')[-1].strip()} / {figure_of(name, arch):.2f} / {ratio:.2f}"
            for arch, cell, ratio in zip(
                ARCHITECTURES, compiled_cells(name), ratios(name), strict=True
            )
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
