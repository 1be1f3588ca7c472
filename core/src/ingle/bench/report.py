"""The results as JSON, and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ingle.bench.figure import Figure
from ingle.bench.result import OWN, Result

MIB: Final = 1024**2


def to_json(result: Result) -> dict[str, Any]:
    """Medians, and the lowest and highest measurement beside each."""
    report: dict[str, Any] = {}
    report |= result.decode[1][OWN].as_json("decode_tokens_per_second")
    report |= result.prefill[OWN].as_json("prefill_tokens_per_second")
    report |= result.first_token.as_json("time_to_first_token_seconds")
    if result.first_token_cached is not None:
        report |= result.first_token_cached.as_json("time_to_first_token_cached_seconds")
    report["decode"] = [
        {"batch": size, **found[OWN].as_json("tokens_per_second")}
        for size, found in result.decode.items()
    ]
    report["prefill_tokens"] = result.prefill_tokens
    report["compare"] = _compared(result)
    return report


def _compared(result: Result) -> dict[str, Any]:
    """By peer and quantity: both engines' tokens per second and the pairs' ratios."""
    found: dict[str, Any] = {name: {"startup_seconds": s} for name, s in result.startup.items()}
    for peer, quantity, own, other in result.comparisons():
        found.setdefault(peer, {})[quantity] = {
            **own.over(other).as_json("ratio"),
            **own.as_json("ingle_tokens_per_second"),
            **other.as_json("peer_tokens_per_second"),
        }
    return found


def to_text(setting: Mapping[str, Any], result: Result) -> str:
    """A line for each figure, then one for each comparison."""
    lines = [_line(name, _shown(name, value)) for name, value in setting.items()]
    lines += [
        _line(f"decode, batch {size}, tokens per second", found[OWN].text())
        for size, found in result.decode.items()
    ]
    lines.append(
        _line(f"prefill, {result.prefill_tokens} tokens, per second", result.prefill[OWN].text())
    )
    lines += _first_tokens(result)
    lines += [_line(f"{name}: start, seconds", f"{s:.2f}") for name, s in result.startup.items()]
    for peer, quantity, own, other in result.comparisons():
        ratio = own.over(other)
        lines.append(
            _line(
                f"against {peer}: {quantity.replace('_', ' ')}",
                f"{ratio.median:.2f} x  ({ratio.lowest:.2f} to {ratio.highest:.2f}); "
                f"{own.median:.4g} and {other.median:.4g} tokens/s",
            )
        )
    return "\n".join(lines)


def _first_tokens(result: Result) -> list[str]:
    lines = [_line("time to first token, cold, seconds", result.first_token.text())]
    cached: Figure | None = result.first_token_cached
    if cached is not None:
        lines.append(_line("time to first token, prefix cached", cached.text()))
    return lines


def _line(name: str, value: str) -> str:
    return f"{name.replace('_', ' '):42} {value}"


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / MIB:,.0f} MiB"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
