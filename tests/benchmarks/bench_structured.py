"""What a JSON schema costs: decoding with its mask and without, in alternation, on the demo model.

    make bench-structured
    python tests/benchmarks/bench_structured.py [MODEL] [--rows 1 8] [--pairs 5] [--json FILE]

Both answers have the same number of tokens: the schema cannot be finished sooner. The rate is of
the tokens after the first: the time of ``LLM.generate`` less that of one token. A cost of 0.05 says
that a masked token took a twentieth longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ingle import LLM, GrammarSpec, SamplingParams
from ingle.demo_model import default_demo_model
from ingle.registry.loader import default_cache_folder

NUM_TOKENS = 128
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


def seconds(llm: LLM, rows: int, grammar: GrammarSpec | None, num_tokens: int) -> float:
    """Time of ``LLM.generate`` for ``rows`` answers at once, each of ``num_tokens``."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=num_tokens,
            ignore_eos=True,
            structured=grammar,
        )
        for seed in range(rows)
    ]
    started = time.perf_counter()
    outputs = llm.generate([PROMPT] * rows, params, use_tqdm=False)
    taken = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return taken


def rate(llm: LLM, rows: int, grammar: GrammarSpec | None) -> float:
    """Decoded tokens per second: what the tokens after the first take."""
    first = seconds(llm, rows, grammar, 1)
    return rows * (NUM_TOKENS - 1) / (seconds(llm, rows, grammar, NUM_TOKENS) - first)


def compare(llm: LLM, rows: int, grammar: GrammarSpec, pairs: int) -> dict[str, Any]:
    """The cost and its spread over ``pairs`` alternations."""
    costs, plain, masked = [], [], []
    for number in range(pairs + 1):
        without, with_mask = rate(llm, rows, None), rate(llm, rows, grammar)
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or str(default_demo_model(default_cache_folder()))
    llm = LLM(model, max_model_len=1024, max_num_seqs=max(options.rows))
    if llm._core.compiler is not None:
        llm._core.compiler.compile_now()
    results = {}
    for rows in options.rows:
        for name, grammar in GRAMMARS.items():
            found = results[f"{name}, {rows} rows"] = compare(llm, rows, grammar, options.pairs)
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
