"""The quants that ``make bench-quants`` makes, and what must hold between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

EXL2_TARGETS = (2.5, 3.0, 4.0, 4.3, 5.0, 6.0)
LAST = tuple(f"exl2-{bits}-rtn" for bits in EXL2_TARGETS if bits > 4)
GPTQ_KINDS: Mapping[str, tuple[str, ...]] = {
    "sym": (),
    "asym": ("--no-sym",),
    "act-order": ("--desc-act",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One quant.

    Attributes:
        name: Its folder's name.
        format: The format.
        flags: Flags of ``ingle quantize`` beside the format.
        baseline: The quant rounded to nearest at the same bits, or empty.
        bits_of: An EXL2 quant with the bits per weight that this one turns out to have, or empty.
    """

    name: str
    format: str
    flags: tuple[str, ...]
    baseline: str = ""
    bits_of: str = ""


def wanted_quants() -> tuple[Wanted, ...]:
    """All of them, those with few bits first."""
    found = [*_affine(4), *_exl2(), *_affine(3), *_affine(8)]
    # Round-to-nearest at many bits says least, so it comes last.
    return tuple(sorted(found, key=lambda item: item.name in LAST))


def _affine(bits: int) -> Iterator[Wanted]:
    """AWQ (4 bits) and GPTQ at one width, groups of 64, each beside round-to-nearest; and EXL2 at
    the bits that GPTQ takes, with the same dense head."""
    size = ("--bits", str(bits), "--group-size", "64")
    rtn = ("--method", "rtn")
    if bits == 4:
        yield Wanted(name="awq-4-rtn", format="awq", flags=(*size, *rtn))
        yield Wanted(name="awq-4", format="awq", flags=size, baseline="awq-4-rtn")
    for kind, flags in GPTQ_KINDS.items():
        name = f"gptq-{bits}-{kind}"
        # Act-order is about calibration only: its baseline is that of symmetric groups.
        plain = f"gptq-{bits}-{'asym' if kind == 'asym' else 'sym'}-rtn"
        if plain == f"{name}-rtn":
            yield Wanted(name=plain, format="gptq", flags=(*size, *flags, *rtn))
        yield Wanted(name=name, format="gptq", flags=(*size, *flags), baseline=plain)
    # GPTQ's 8 bits in groups of 64 take 8.4 in all, and EXL2 ends at 8.1.
    if bits < 8:
        flags = ("--head-bits", "16")
        twin = f"gptq-{bits}-sym"
        yield Wanted(name=f"exl2-like-gptq-{bits}", format="exl2", flags=flags, bits_of=twin)


def _exl2() -> Iterator[Wanted]:
    for bits in EXL2_TARGETS:
        flags = ("--bpw", str(bits), "--head-bits", "6")
        rtn = f"exl2-{bits}-rtn"
        yield Wanted(name=rtn, format="exl2", flags=(*flags, "--method", "rtn"))
        yield Wanted(name=f"exl2-{bits}", format="exl2", flags=flags, baseline=rtn)


def checks(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    """Whether each claim holds, and the claim with its figures; of quants that are there.

    Args:
        results: What ``ingle eval --json`` says of each quant, by name.
    """
    for item in wanted_quants():
        if item.name not in results:
            continue
        ours = results[item.name]
        if item.baseline in results:
            yield _beats(item.name, ours, item.baseline, results[item.baseline])
        if item.bits_of:
            yield from _like_gptq(item, results)
    targets = [f"exl2-{bits}" for bits in EXL2_TARGETS if f"exl2-{bits}" in results]
    for fewer, more in pairwise(targets):
        low, high = results[fewer]["kl"], results[more]["kl"]
        yield high < low, f"{more} is closer than {fewer}: KL {high:.5f} against {low:.5f}"


def _beats(
    name: str, ours: Mapping[str, Any], baseline: str, theirs: Mapping[str, Any]
) -> tuple[bool, str]:
    figures = f"KL {ours['kl']:.5f} against {theirs['kl']:.5f}"
    if name.startswith("gptq-8"):
        most = theirs["kl_interval"][1]
        return ours["kl"] <= most, f"{name} is no worse than {baseline}: {figures} (to {most:.5f})"
    return ours["kl"] < theirs["kl"], f"{name} beats {baseline}: {figures}"


def _like_gptq(
    item: Wanted, results: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[bool, str]]:
    ours = results[item.name]
    for kind in GPTQ_KINDS:
        name = f"{item.bits_of.removesuffix('-sym')}-{kind}"
        if name not in results:
            continue
        theirs = results[name]
        bits = f"{ours['bits_per_weight']:.3f} against {theirs['bits_per_weight']:.3f} bits"
        yield (
            ours["kl"] <= theirs["kl"],
            f"{item.name} is no worse than {name}: KL {ours['kl']:.5f} against {theirs['kl']:.5f}, "
            f"{bits}",
        )


def markdown(results: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> str:
    """The table of ``docs/benchmarks.md``."""
    lines = [
        "| quant | bits | head | MB | KL (95 %) | top-1 | perplexity | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for item in wanted_quants():
        if item.name in results:
            lines.append(_row(item.name, results[item.name], seconds.get(item.name)))
    return "\n".join(lines) + "\n"


def _row(name: str, found: Mapping[str, Any], seconds: float | None) -> str:
    low, high = found["kl_interval"]
    took = "" if seconds is None else f"{seconds:.0f}"
    cells: Sequence[str] = (
        name,
        f"{found['bits_per_weight']:.3f}",
        f"{found['head_bits_per_weight']:.2f}",
        f"{found['bytes'] / 1e6:.1f}",
        f"{found['kl']:.5f} ({low:.5f} to {high:.5f})",
        f"{100 * found['top1']:.1f} %",
        f"{found['perplexity']:.3f}",
        took,
    )
    return f"| {' | '.join(cells)} |"
