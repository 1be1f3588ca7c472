"""Draws docs/pictures from the tables in docs: pictures.py [FOLDER]. A test keeps them current."""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INK, FAINT, ACCENT = "#334155", "#cbd5e1", "#c2410c"
COLOURS = ("#c2410c", "#0f766e", "#6d28d9", "#b45309", "#475569", "#0369a1", "#be185d")
FONT = 'font-family="system-ui, sans-serif"'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """A picture on white, readable on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT} '
        f'font-size="13" fill="{INK}" role="img"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A rectangle."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}" {more}/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    """A line."""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{colour}" {more}/>'


def memory_budget() -> str:
    """The plan printed in docs/memory.md as one bar against the card's budget."""
    page = (ROOT / "docs/memory.md").read_text()
    rows = re.findall(r"^([a-zA-Z][a-zA-Z ]+?) +(\d+\.\d\d) GiB", page, re.MULTILINE)
    terms = [(name, float(size)) for name, size in rows if name not in ("needed", "budget")]
    sizes = {name: float(size) for name, size in rows}
    scale, left, parts, at = 24.0, 40.0, [], 40.0
    parts.append(
        text(
            left, 34, "Llama-3-70B, EXL2 at 2.4 bits, fp8 cache, 8,192 tokens", "font-weight='600'"
        )
    )
    for index, (_, size) in enumerate(terms):
        parts.append(box(at, 55, size * scale, 46, COLOURS[index % len(COLOURS)]))
        at += size * scale
    end = left + sizes["budget"] * scale
    card = left + 24 * scale
    parts.append(box(at, 55, end - at, 46, "#ecfdf5", f'stroke="{FAINT}"'))
    parts.append(box(end, 55, card - end, 46, FAINT))
    parts.append(line(end, 46, end, 112, INK, 'stroke-dasharray="4 3"'))
    parts.append(text(end, 126, f"budget {sizes['budget']:.2f} of 24 GiB", 'text-anchor="end"'))
    for index, (name, size) in enumerate([t for t in terms if t[1] > 0.0]):
        x, y = left + 190 * (index % 3), 156 + 24 * (index // 3)
        colour = COLOURS[[t[0] for t in terms].index(name) % len(COLOURS)]
        parts.append(box(x, y - 11, 13, 13, colour))
        parts.append(text(x + 20, y, f"{name} {size:.2f} GiB"))
    spare = sizes["budget"] - sizes["needed"]
    parts.append(
        text(
            left, 210, f"{spare:.2f} GiB to spare; 1.96 GiB of token embeddings lie in host memory."
        )
    )
    return svg(660, 228, "Memory of a 24 GB card, term by term", parts)


def quants() -> list[tuple[str, float, float]]:
    """(name, bits, KL) of every row of the quants' table that has both figures."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    section = page.split("\n## Quants of the demo model", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines()]
    head = next(cells for cells in rows if cells[0] == "quant")
    bits, kl = head.index("bits"), next(i for i, cell in enumerate(head) if cell.startswith("KL"))
    found = []
    for cells in rows:
        if len(cells) != len(head):
            continue
        figures = [re.match(r"\d+\.\d+", cells[column]) for column in (bits, kl)]
        if figures[0] and figures[1]:
            found.append((cells[0], float(figures[0][0]), float(figures[1][0])))
    return found


def quality_bits() -> str:
    """KL divergence, on a logarithmic scale, against bits per weight."""
    points = quants()
    left, top, width, height = 70.0, 30.0, 520.0, 260.0
    low, high = 2.0, 6.5

    def x(bits: float) -> float:
        return left + (bits - low) / (high - low) * width

    def y(kl: float) -> float:
        from math import log10

        return top + height * (1 - (log10(kl) + 2.5) / 2.5)

    parts = []
    for kl in (0.01, 0.03, 0.1, 0.3, 1.0):
        parts.append(line(left, y(kl), left + width, y(kl), FAINT))
        parts.append(text(left - 8, y(kl) + 4, f"{kl:g}", 'text-anchor="end"'))
    for bits in (2, 3, 4, 5, 6):
        parts.append(text(x(bits), top + height + 20, str(bits), 'text-anchor="middle"'))
    parts.append(
        text(
            left + width / 2,
            top + height + 42,
            "bits per weight of the layers",
            'text-anchor="middle"',
        )
    )
    parts.append(text(left, 20, "KL divergence from the original, nats (lower is better)"))
    exl2 = sorted((b, k) for name, b, k in points if name.lower().startswith("exl2"))
    path = " ".join(f"{x(b):g},{y(k):g}" for b, k in exl2)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[1]}" stroke-width="2"/>')
    for name, bits, kl in points:
        colour = COLOURS[{"E": 1, "G": 0, "A": 2}.get(name[0], 4)]
        parts.append(f'<circle cx="{x(bits):g}" cy="{y(kl):g}" r="5" fill="{colour}"/>')
        label = name.removesuffix(" bpw").split(",")[0]
        label = f"{label}, nearest" if "nearest" in name else label
        parts.append(text(x(bits) + 9, y(kl) + 4, label, 'font-size="11"'))
    return svg(660, 350, "Quality against bits of the demo model's quants", parts)


LAYERS = (
    ("HTTP", "OpenAI, Anthropic, Ollama, Kobold → one call", "ingle_server"),
    ("Engine thread", "sleeps on its inbox; one step after another", "engine/engine_thread.py"),
    ("Scheduler", "which tokens of whom; blocks of the cache; no tensors", "engine/scheduler.py"),
    ("Model runner", "plan → tensors → decoder → logits; no queues", "engine/model_runner.py"),
    ("Sampler", "stages in order, grammars, log-probabilities", "sampling/"),
    ("Text", "detokenise, stop strings, server-sent events", "engine/output_processor.py"),
)
PLUGINS = (
    ("Weight formats", "AWQ, GPTQ, EXL2, yours"),
    ("Matmul kernels", "checked against dequantize()"),
    ("KV cache formats", "fp8, int8, int4, yours"),
)


def architecture() -> str:
    """The way of a request downwards, and where plugins come in."""
    parts = []
    for index, (name, what, where) in enumerate(LAYERS):
        y = 20 + 62 * index
        parts.append(box(20, y, 400, 48, "#f1f5f9", f'rx="6" stroke="{FAINT}"'))
        parts.append(text(34, y + 20, name, 'font-weight="600"'))
        parts.append(text(406, y + 20, where, f'font-size="10" text-anchor="end" fill="{ACCENT}"'))
        parts.append(text(34, y + 38, what, 'font-size="12"'))
        if index:
            parts.append(line(220, y - 14, 220, y, INK, 'stroke-width="2"'))
            parts.append(
                f'<path d="M215 {y - 6} L220 {y} L225 {y - 6}" fill="none" stroke="{INK}"/>'
            )
    parts.append(text(480, 150, "plugins, by ingle.plugin", 'font-weight="600"'))
    for index, (name, what) in enumerate(PLUGINS):
        y = 165 + 62 * index
        parts.append(box(480, y, 220, 48, "#fff7ed", f'rx="6" stroke="{ACCENT}"'))
        parts.append(text(494, y + 20, name, 'font-weight="600"'))
        parts.append(text(494, y + 38, what, 'font-size="12"'))
        parts.append(line(420, 230, 480, y + 24, ACCENT, 'stroke-dasharray="4 3"'))
    return svg(720, 400, "The way of a request, and where plugins come in", parts)


PICTURES = {
    "architecture.svg": architecture,
    "memory_budget.svg": memory_budget,
    "quality_bits.svg": quality_bits,
}


def main() -> None:
    """Writes every picture."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
