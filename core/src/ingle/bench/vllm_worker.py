"""Runs vLLM for ``ingle bench``: by path, in vLLM's own interpreter, which has no Ingle.

    python vllm_worker.py MODEL DTYPE CONTEXT

Reads questions from standard input, one JSON object a line, and answers each with a line
``ANSWER {"tokens_per_second": ...}``; a first such line says that the model is loaded.
"""

from __future__ import annotations

import json
import random
import sys
import time
from importlib import import_module
from typing import Any


def measure(engine: Any, params: Any, question: dict[str, int], number: int) -> float:
    """Tokens a second of decoding, or of the prompt when one token is wanted."""
    draw = random.Random(number)
    counts: dict[str, int] = {}
    begun = time.perf_counter()
    for index in range(question["batch"]):
        ids = [draw.randrange(100, 20_000) for _ in range(question["num_prompt"])]
        name = f"{number}-{index}"
        engine.add_request(name, {"prompt_token_ids": ids}, params(question["num_output"]))
        counts[name] = 0
    first = None
    num_before = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] += sum(len(one.token_ids) for one in output.outputs)
        if first is None and all(counts.values()):
            first, num_before = time.perf_counter(), sum(counts.values())
    end = time.perf_counter()
    if question["num_output"] == 1:
        return question["num_prompt"] / (end - begun)
    return (sum(counts.values()) - num_before) / (end - (first or begun))


def main() -> None:
    """Loads, then answers until standard input ends."""
    sys.path.pop(0)  # this file's own folder, whose names are not vLLM's business
    vllm = import_module("vllm")
    deltas = import_module("vllm.sampling_params").RequestOutputKind.DELTA

    model, dtype, context = sys.argv[1:]
    llm = vllm.LLM(
        model, dtype=dtype, max_model_len=int(context), enable_prefix_caching=False, max_num_seqs=32
    )

    def params(num_output: int) -> Any:
        return vllm.SamplingParams(
            temperature=0, max_tokens=num_output, ignore_eos=True, output_kind=deltas
        )

    print('ANSWER {"ready": true}', flush=True)
    for number, line in enumerate(sys.stdin):
        speed = measure(llm.llm_engine, params, json.loads(line), number)
        print("ANSWER", json.dumps({"tokens_per_second": speed}), flush=True)


if __name__ == "__main__":
    main()
