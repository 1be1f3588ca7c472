"""A plot of quality against bits per weight: KL upwards on a logarithmic scale, bits to the right.

SVG is written here; PNG needs matplotlib, which is asked to do nothing but the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ingle.errors import ConfigError
from ingle.quantize.evaluation import Evaluation
from ingle.quantize.quality_table import short_name

WIDTH: Final = 820
HEIGHT: Final = 520
LEFT: Final = 90
RIGHT: Final = 30
TOP: Final = 50
BOTTOM: Final = 60
LEGEND_LINE: Final = 18
COLOURS: Final = ("#1b6ca8", "#c8553d", "#3b7d3a", "#7a4fa3", "#b8860b", "#2f4f4f")
LEAST_KL: Final = 1e-7
"""A model that equals its reference has KL 0, which no logarithm shows; it is drawn here."""
TITLE: Final = "KL(reference || model) per token, in nats, against bits per weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The ranges the picture shows: bits per weight, and powers of ten of the KL."""

    first_bits: float
    last_bits: float
    first_power: int
    last_power: int

    @classmethod
    def around(cls, evaluations: Sequence[Evaluation]) -> Axes:
        """Axes with all points inside."""
        bits = [evaluation.bits_per_weight for evaluation in evaluations]
        powers = [math.log10(_shown(evaluation.kl)) for evaluation in evaluations]
        first = math.floor(min(powers))
        return cls(
            first_bits=math.floor(min(bits)),
            last_bits=math.floor(max(bits)) + 1,
            first_power=first,
            last_power=max(first + 1, math.ceil(max(powers))),
        )

    def x(self, bits: float) -> float:
        """Pixels from the left."""
        share = (bits - self.first_bits) / (self.last_bits - self.first_bits)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, kl: float) -> float:
        """Pixels from the top."""
        share = (math.log10(_shown(kl)) - self.first_power) / (self.last_power - self.first_power)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def check_plot_path(path: Path) -> None:
    """Whether ``write_plot`` can write such a file.

    Raises:
        ConfigError: When its suffix is neither, or it is PNG and matplotlib is missing.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: give a file that ends in .svg or .png.")
    if path.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {path}: PNG needs matplotlib (pip install matplotlib); an .svg needs nothing."
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}.")


def write_plot(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Writes the picture as SVG or, where matplotlib is installed, as PNG.

    Raises:
        ConfigError: As ``check_plot_path``.
    """
    check_plot_path(path)
    if path.suffix.lower() == ".svg":
        path.write_text(svg_plot(evaluations), encoding="utf-8")
    else:
        _write_png(evaluations, path)


def svg_plot(evaluations: Sequence[Evaluation]) -> str:
    """The picture as SVG: a curve per format and cache type, a point per model."""
    axes = Axes.around(evaluations)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="24" font-size="15" text-anchor="middle">{TITLE}</text>',
        *_grid(axes),
    ]
    for number, (name, points) in enumerate(_series(evaluations).items()):
        parts += _curve(axes, name, points, number)
    return "\n".join([*parts, "</svg>", ""])


def _shown(kl: float) -> float:
    return max(kl, LEAST_KL)


def _series(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Points by format and cache type, each curve from few bits to many."""
    series: dict[str, list[Evaluation]] = {}
    for evaluation in sorted(evaluations, key=lambda e: e.bits_per_weight):
        cache = evaluation.kv_cache_dtype
        name = evaluation.format if cache == "auto" else f"{evaluation.format}, cache {cache}"
        series.setdefault(name, []).append(evaluation)
    return series


def _grid(axes: Axes) -> list[str]:
    lines = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    step = max(1, math.ceil((axes.last_bits - axes.first_bits) / 10))
    for bits in range(int(axes.first_bits), int(axes.last_bits) + 1, step):
        x = f"{axes.x(bits):.1f}"
        lines += [
            f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="#ddd"/>',
            f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{bits}</text>',
        ]
    for power in range(axes.first_power, axes.last_power + 1):
        y = f"{axes.y(10.0**power):.1f}"
        lines += [
            f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">1e{power}</text>',
        ]
    middle = (LEFT + right) / 2
    lines.append(
        f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">'
        "bits per weight of the layers&#39; linears, as stored</text>"
    )
    return lines


def _curve(axes: Axes, name: str, points: Sequence[Evaluation], number: int) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    places = [(axes.x(p.bits_per_weight), axes.y(p.kl)) for p in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for point, (x, y) in zip(points, places, strict=True):
        label = f"{short_name(point.model)}: {point.bits_per_weight:.3f} bits, KL {point.kl:.5f}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(label)}</title></circle>"
        )
    x, y = WIDTH - RIGHT - 190, TOP + 14 + number * LEGEND_LINE
    parts += [
        f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>',
        f'<text x="{x + 10}" y="{y}">{escape(name)}</text>',
    ]
    return parts


def _write_png(evaluations: Sequence[Evaluation], path: Path) -> None:
    """The same through matplotlib, which is imported by name: it is nobody's requirement."""
    figure = import_module("matplotlib.figure").Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axes = figure.subplots()
    for name, points in _series(evaluations).items():
        bits = [point.bits_per_weight for point in points]
        axes.plot(bits, [_shown(point.kl) for point in points], marker="o", label=name)
    axes.set_yscale("log")
    axes.set_title(TITLE, fontsize=11)
    axes.set_xlabel("bits per weight of the layers' linears, as stored")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)
