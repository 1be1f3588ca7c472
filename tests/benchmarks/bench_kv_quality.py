"""What every KV cache costs in quality: perplexity on held-out text, and greedy agreement.

Perplexity is ``ingle eval``'s, in float32, so that nothing but the cache differs. Agreement: 20
prompts, 64 tokens each, greedily; the share of tokens before the first one that differs from the
exact cache's answer, and how many answers are the same to the end.

    python tests/benchmarks/bench_kv_quality.py [MODEL] [--formats ...]
"""

from __future__ import annotations

import argparse
from itertools import takewhile

from ingle import LLM, SamplingParams
from ingle.demo_model import default_demo_model
from ingle.plugin.cache_folder import default_cache_folder
from ingle.quantize.evaluation import EvaluationConfig, evaluations

FORMATS = (
    "int8",
    "k=auto,v=fp8",
    "fp8_e4m3",
    "k=int8,v=int4",
    "fp8_e5m2",
    "int4",
)
NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a miller who",
    "def fibonacci(n):",
    "The three laws of thermodynamics say that",
    "To bake bread you need flour, water and",
    "In 1969 the first people",
    "A list of the planets of the solar system:",
    "The difference between a frog and a toad is",
    "SELECT name, age FROM people WHERE",
    "Dear Sir or Madam, I am writing to",
    "Water boils at 100 degrees because",
    "Shakespeare wrote many plays, among them",
    "The recipe for a good night's sleep:",
    "import numpy as np\n\ndef mean(values):",
    "Photosynthesis is the process by which",
    "The river ran past the old mill, and",
    "To solve x + 3 = 7, first",
    "Bees dance in order to",
    "The history of the bicycle begins in",
    "My favourite season is autumn, since",
)


def answers(model: str, cache: str) -> list[list[int]]:
    """Greedy answers to all prompts, each alone in its step's batch of 20."""
    llm = LLM(
        model=model,
        kv_cache_dtype=cache,
        device="cpu",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=len(PROMPTS),
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = llm.generate(list(PROMPTS), params)
    return [list(output.outputs[0].token_ids) for output in found]


def agreement(found: list[list[int]], exact: list[list[int]]) -> tuple[float, int]:
    """Share of tokens before the first difference; answers without one."""
    same = [
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))
        for one, other in zip(found, exact, strict=True)
    ]
    return sum(same) / (NUM_TOKENS * len(exact)), sum(n == NUM_TOKENS for n in same)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--max-tokens", type=int, default=4096)
    given = parser.parse_args()
    model = given.model or str(default_demo_model(default_cache_folder()))
    exact = answers(model, "auto")
    config = EvaluationConfig(max_tokens=given.max_tokens, window=1024, dtype="float32")
    for found in evaluations([model], given.formats, config):
        share, same = agreement(answers(model, found.kv_cache_dtype), exact)
        against = 100 * (found.perplexity / found.reference_perplexity - 1)
        print(
            f"| `{found.kv_cache_dtype}` | {found.perplexity:.3f} | {against:+.2f} % | "
            f"{found.kl:.4f} ({found.kl_interval[0]:.4f} to {found.kl_interval[1]:.4f}) | "
            f"{100 * found.top1:.1f} % | {100 * share:.0f} %, {same} of {len(PROMPTS)} |",
            flush=True,
        )
    print(f"`auto`: perplexity {found.reference_perplexity:.3f}, {found.num_tokens} tokens")


if __name__ == "__main__":
    main()
