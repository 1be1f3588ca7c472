"""What a JSON schema costs: decoding with its mask and without, in alternation, on the demo model.

    make bench-structured
    python tests/benchmarks/bench_structured.py [MODEL] [--rows 1 8] [--cpu-time]

Both answers have the same number of tokens: the schema cannot be finished sooner. The rate is of
the tokens after the first: the time of ``LLM.generate`` less that of one token. A cost of 0.05 says
that a masked token took a twentieth longer. With ``--cpu-time`` the process's CPU time is taken,
which other programs on the machine disturb less; set OMP_NUM_THREADS=1 with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingle import LLM, GrammarSpec, SamplingParams
from ingle.demo_model import default_demo_model
from ingle.plugin.cache_folder import default_cache_folder

PROMPT = "<|im_start|>user\nList people as JSON.<|im_end|>\n<|im_start|>assistant\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["engineer", "teacher", "nurse", "farmer"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 40, "maxItems": 60}
GRAMMARS = {
    "json schema": GrammarSpec("json", json.dumps(SCHEMA)),
    "json object": GrammarSpec("json", '{"type":"object"}'),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: with which model, for how many tokens of how many rows, by which clock."""

    llm: LLM
    num_tokens: int
    rows: int
    clock: Callable[[], float]


def seconds(bench: Bench, grammar: GrammarSpec | None, num_tokens: int) -> float:
    """Time of ``LLM.generate`` for all rows at once, each of ``num_tokens``."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=num_tokens,
            ignore_eos=True,
            structured=grammar,
        )
        for seed in range(bench.rows)
    ]
    started = bench.clock()
    outputs = bench.llm.generate([PROMPT] * bench.rows, params, use_tqdm=False)
    taken = bench.clock() - started
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return taken


def rate(bench: Bench, grammar: GrammarSpec | None) -> float:
    """Decoded tokens per second: what the tokens after the first take."""
    first = seconds(bench, grammar, 1)
    whole = seconds(bench, grammar, bench.num_tokens)
    return bench.rows * (bench.num_tokens - 1) / (whole - first)


def compare(bench: Bench, grammar: GrammarSpec, pairs: int) -> dict[str, Any]:
    """The cost and its spread over ``pairs`` alternations."""
    costs, plain, masked = [], [], []
    for number in range(pairs + 1):
        without, with_mask = rate(bench, None), rate(bench, grammar)
        if number:  # the first pair warms up
            costs.append(without / with_mask - 1)
            plain.append(without)
            masked.append(with_mask)
    return {
        "cost": statistics.median(costs),
        "cost_min": min(costs),
        "cost_max": max(costs),
        "plain_tokens_per_second": statistics.median(plain),
        "masked_tokens_per_second": statistics.median(masked),
        "pairs": pairs,
    }


def main() -> None:
    """Prints a line per grammar and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or str(default_demo_model(default_cache_folder()))
    llm = LLM(model, max_model_len=1024, max_num_seqs=max(options.rows))
    if llm._core.compiler is not None:
        llm._core.compiler.compile_now()
    clock = time.process_time if options.cpu_time else time.perf_counter
    results = {}
    for rows in options.rows:
        bench = Bench(llm, options.tokens, rows, clock)
        for name, grammar in GRAMMARS.items():
            found = results[f"{name}, {rows} rows"] = compare(bench, grammar, options.pairs)
            print(
                f"{name}, {rows} rows: {found['cost']:+.1%} ({found['cost_min']:+.1%} to "
                f"{found['cost_max']:+.1%}); plain {found['plain_tokens_per_second']:.1f}, masked "
                f"{found['masked_tokens_per_second']:.1f} tokens/s",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
