"""The results as bars, in SVG: median, and a line from the lowest to the highest measurement."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from ingle.bench.figure import Figure
from ingle.bench.result import OWN, Result
from ingle.errors import ConfigError

WIDTH: Final = 820
LEFT: Final = 210
RIGHT: Final = 110
TOP: Final = 50
BAR: Final = 18
GAP: Final = 14
COLOURS: Final = ("#1b6ca8", "#c8553d", "#3b7d3a")


def check_plot_path(path: str | None) -> None:
    """Raises ConfigError unless ``path`` is an SVG file that can be written, or None."""
    if path is None:
        return
    if Path(path).suffix.lower() != ".svg":
        raise ConfigError(f"--plot {path}: give a file that ends in .svg.")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).parent}.")


def svg_plot(result: Result, title: str) -> str:
    """One group of bars per quantity, each on its own scale, one bar per engine."""
    groups = {f"decode, batch {size}": found for size, found in result.decode.items()}
    groups[f"prefill, {result.prefill_tokens} tokens"] = result.prefill
    parts, y = [], TOP
    for name, found in groups.items():
        parts.append(f'<text x="12" y="{y + 13}" font-weight="bold">{escape(name)}</text>')
        longest = max(figure.highest for figure in found.values())
        for number, (engine, figure) in enumerate(found.items()):
            parts += _bar(y, engine, figure, longest, COLOURS[number % len(COLOURS)])
            y += BAR + 4
        y += GAP
    return "\n".join([*_head(title, y), *parts, "</svg>", ""])


def _head(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="24" font-size="15" text-anchor="middle">'
        f"{escape(title)}: tokens per second</text>",
    ]


def _bar(y: int, engine: str, figure: Figure, longest: float, colour: str) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / longest
    width, first, last = (v * scale for v in (figure.median, figure.lowest, figure.highest))
    middle = y + BAR / 2
    label = "Ingle" if engine == OWN else engine
    return [
        f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(label)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<line x1="{LEFT + first:.1f}" y1="{middle}" x2="{LEFT + last:.1f}" y2="{middle}" '
        'stroke="black"/>',
        f'<text x="{LEFT + last + 6:.1f}" y="{y + 13}">{figure.median:.4g}</text>',
    ]
