"""Checks and times every GPU kernel on the card at hand; ``make bench-gpu``.

    python tests/benchmarks/bench_gpu.py                # on a CUDA machine, under 6 minutes
    python tests/benchmarks/bench_gpu.py --interpret    # anywhere: the script itself, tiny shapes

Needs torch and triton, nothing else, and nothing installed: kernels are imported from the checkout.
A section that fails is printed and the next one runs. The exit code is 1 when a result was wrong or
a section failed, 2 without a GPU. A short table comes last, a line of JSON before it, which is also
written to ``$OUT/bench_gpu.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--interpret", action="store_true", help="Triton's interpreter, tiny shapes"
    )
    parser.add_argument("--only", default="", help="comma-separated section names")
    parser.add_argument("--seconds", type=float, default=330.0, help="time for all sections")
    return parser.parse_args()


def prepare(interpret: bool) -> str | None:
    """Makes the kernels importable; returns why this machine cannot run them, or None.

    Plugins mark their functions with pluggy, which no kernel needs: a stand-in marks nothing.
    """
    pluggy = types.ModuleType("pluggy")
    markers = dict.fromkeys(("HookimplMarker", "HookspecMarker"), _marker)
    vars(pluggy).update(markers, PluginManager=object)
    sys.modules["pluggy"] = pluggy
    plugins = (ROOT / "plugins" / name for name in ("quant_exl2", "kv_fp8"))
    for source in (ROOT / "core" / "src", *(plugin / "src" for plugin in plugins)):
        sys.path.insert(0, str(source))
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        from ingle.testing.triton_interpreter import install

        install()
        return None
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device: run this on a GPU machine, or add --interpret to test the script"
    return None


def _marker(project: str) -> Any:
    """What marks functions, with options or without, and leaves them as they are."""
    return lambda *function, **options: function[0] if function else lambda other: other


def run_sections(only: set[str], seconds: float, interpret: bool) -> dict[str, Any]:
    """Runs the sections one after another, each in its share of the time; never raises."""
    from bench_gpu_sections import SECTIONS, Bench

    bench = Bench.create(interpret=interpret)
    report: dict[str, Any] = {"device": bench.describe(), "sections": {}, "failed": []}
    print(json.dumps(report["device"]), flush=True)
    end = time.monotonic() + seconds
    chosen = [s for s in SECTIONS if not only or s.name in only]
    for i, section in enumerate(chosen):
        left = max(5.0, end - time.monotonic())
        share = section.weight / sum(s.weight for s in chosen[i:])
        started = time.monotonic()
        print(f"\n== {section.name} (up to {left * share:.0f} s)", flush=True)
        try:
            rows = section.run(bench, started + left * share)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            report["failed"].append(section.name)
            bench.recover()
            continue
        for row in rows:
            print("  " + "  ".join(f"{key}={_short(value)}" for key, value in row.items()))
        print(f"  took {time.monotonic() - started:.1f} s", flush=True)
        report["sections"][section.name] = rows
        if any(row.get("ok") is False for row in rows):
            report["failed"].append(section.name)
    return report


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def short_table(report: dict[str, Any]) -> list[str]:
    """What was found, a line for each kernel, shape and model: us, GB/s, share of the card's copy
    bandwidth, tokens a second; and how many results were right."""
    rows = [row for rows in report["sections"].values() for row in rows]
    lines = [f"{'':44} {'us':>10} {'GB/s':>8} {'of copy':>8} {'tokens/s':>9}"]
    for row in rows:
        if not {"us", "tokens/s"} & set(row):
            continue
        share = f"{100 * row['share']:.1f} %" if "share" in row else ""
        cells = [_short(row[key]) if key in row else "" for key in ("us", "GB/s", "tokens/s")]
        lines.append(f"{row['what']:44} {cells[0]:>10} {cells[1]:>8} {share:>8} {cells[2]:>9}")
    judged = [row for row in rows if "ok" in row]
    right = sum(bool(row["ok"]) for row in judged)
    lines.append(f"{right} of {len(judged)} results right on {report['device']['device']}")
    lines.append(f"failed: {', '.join(report['failed']) or 'nothing'}")
    return lines


def main() -> int:
    arguments = parse_arguments()
    reason = prepare(arguments.interpret)
    if reason is not None:
        print(f"bench_gpu: {reason}", file=sys.stderr)
        return 2
    only = {name for name in arguments.only.split(",") if name}
    report = run_sections(only, arguments.seconds, arguments.interpret)
    line = json.dumps(report)
    print(f"\n{line}\n")
    print("\n".join(short_table(report)), flush=True)
    if out := os.environ.get("OUT"):
        Path(out, "bench_gpu.json").write_text(line + "\n")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
