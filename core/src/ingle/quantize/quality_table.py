"""Evaluations as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any, Final

from ingle.quantize.evaluation import Evaluation

MIB: Final = 1024**2
HEADINGS: Final = ("model", "format", "cache", "bpw", "MiB", "perplexity", "KL", "95 %", "top-1")


def to_json(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """One object per evaluation, named as its fields are."""
    return [asdict(evaluation) for evaluation in evaluations]


def format_table(evaluations: Sequence[Evaluation]) -> str:
    """One line per evaluation, and above them what they were measured with."""
    if not evaluations:
        return ""
    first = evaluations[0]
    rows = [HEADINGS, *(_row(evaluation) for evaluation in evaluations)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        f"{first.num_tokens} predicted tokens of {first.text}; reference {first.reference}, "
        f"perplexity {first.reference_perplexity:.4f}"
    ]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def short_name(model: str) -> str:
    """A folder's own name, a hub id without its owner."""
    return PurePath(model).name or model


def _row(evaluation: Evaluation) -> tuple[str, ...]:
    low, high = evaluation.kl_interval
    return (
        short_name(evaluation.model),
        evaluation.format,
        evaluation.kv_cache_dtype,
        f"{evaluation.bits_per_weight:.3f}",
        f"{evaluation.bytes / MIB:.1f}",
        f"{evaluation.perplexity:.4f}",
        f"{evaluation.kl:.5f}",
        f"{low:.5f}..{high:.5f}",
        f"{evaluation.top1:.4f}",
    )
