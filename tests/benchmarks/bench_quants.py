"""What quantising the demo model costs: makes every quant of the list, measures and checks them.

    make bench-quants
    python tests/benchmarks/bench_quants.py [--model MODEL] [--work FOLDER] [--only NAME ...]
        [--tokens 2048] [--plot docs/quality.svg]

Every quant is made by ``ingle quantize`` in a process of its own and kept in the work folder with
the seconds it took; what is there is not made again, and a run that was killed goes on. EXL2 is
measured once. Prints the table of ``docs/benchmarks.md`` and the claims; fails when one does not
hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quant_list import Wanted, checks, markdown, wanted_quants

from ingle.demo_model import default_demo_model
from ingle.plugin.cache_folder import default_cache_folder
from ingle.quantize.evaluation import Evaluation, EvaluationConfig, evaluations
from ingle.quantize.quality_plot import write_plot
from ingle.quantize.stored_bits import stored_bits

MADE_AT_ONCE = 5
"""Quants that are made before they are measured, so that a killed run has lost little."""


def main() -> int:
    """Makes, measures, prints; 0 when every claim holds."""
    arguments = _arguments()
    model = arguments.model or default_demo_model(default_cache_folder())
    work: Path = arguments.work or default_cache_folder() / "quants" / "bench"
    work.mkdir(parents=True, exist_ok=True)
    items = [i for i in wanted_quants() if not arguments.only or i.name in arguments.only]
    for start in range(0, len(items), MADE_AT_ONCE):
        some = items[start : start + MADE_AT_ONCE]
        for item in some:
            _make(model, work, item)
        _measure(model, work, some, arguments.tokens)
    return _report(work, arguments.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _make(model: Path, work: Path, item: Wanted) -> None:
    """Makes one quant unless it is there, and notes the seconds: those of this process's run."""
    out = work / item.name
    if (out / "config.json").is_file() and not (out / ".quantize").exists():
        return
    flags = [*item.flags, *_exl2_flags(work, item)]
    command = ["quantize", str(model), str(out), "--format", item.format, *flags]
    print("$ ingle", *command, flush=True)
    resumed = out.exists()
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "ingle", *command, "--no-measure-kl"], check=True)
    seconds = None if resumed else time.monotonic() - began
    _write(work / f"{item.name}.made.json", {"command": command, "seconds": seconds})


def _exl2_flags(work: Path, item: Wanted) -> Sequence[str]:
    """The measurement to use again, and the bits of another quant."""
    if item.format != "exl2":
        return ()
    method = "rtn" if "rtn" in item.flags else "gptq"
    flags = ("--measurement", str(work / f"measurement-{method}.json"))
    if not item.bits_of:
        return flags
    bits = stored_bits(work / item.bits_of, "gptq").bits_per_weight
    return (*flags, "--bpw", f"{bits:.4f}")


def _measure(model: Path, work: Path, items: Iterable[Wanted], tokens: int) -> None:
    """Compares those that are not yet measured with the original, over held-out text."""
    known = _results(work)
    missing = [str(work / item.name) for item in items if item.name not in known]
    if not missing:
        return
    config = EvaluationConfig(reference=str(model), max_tokens=tokens)
    for found in evaluations(missing, ("auto",), config):
        name = Path(found.model).name
        kept = {key: getattr(found, key) for key in Evaluation.__dataclass_fields__}
        _write(work / f"{name}.eval.json", {**kept, "model": name, "reference": model.name})
        print(f"{name}: {found.bits_per_weight:.3f} bits, KL {found.kl:.5f}", flush=True)


def _results(work: Path) -> dict[str, dict[str, Any]]:
    files = sorted(work.glob("*.eval.json"))
    return {f.name.removesuffix(".eval.json"): json.loads(f.read_text()) for f in files}


def _report(work: Path, plot: Path | None) -> int:
    results = _results(work)
    made = {f.name.removesuffix(".made.json"): f for f in work.glob("*.made.json")}
    seconds = {name: json.loads(file.read_text())["seconds"] for name, file in made.items()}
    print("\n" + markdown(results, seconds))
    claims = list(checks(results))
    for holds, claim in claims:
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    _plot(results, plot or work / "quality.svg")
    return 0 if all(holds for holds, _ in claims) else 1


def _plot(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One curve per format, and apart those rounded to nearest."""
    points = []
    for name, found in results.items():
        kind = f"{found['format']}, rounded to nearest" if name.endswith("-rtn") else None
        points.append(Evaluation(**{**found, "format": kind or found["format"]}))
    if points:
        write_plot(points, path)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
