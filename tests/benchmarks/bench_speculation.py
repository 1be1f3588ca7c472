"""What prompt lookup brings: decoding with and without it, in alternation, on the demo model.

    make bench-speculation
    python tests/benchmarks/bench_speculation.py [MODEL] [--dtype float32] [--pairs 5] [--json FILE]

The copy task goes on a text that stands in the prompt already, with one word changed; the free ones
are questions. Ratios above 1 say that guessing pays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingle import LLM, SamplingParams
from ingle.checkpoint.chat_template import Conversation
from ingle.demo_model import default_demo_model
from ingle.engine.engine_core import EngineCore
from ingle.plugin.cache_folder import default_cache_folder

TEXT = (
    "The harbour lay quiet in the grey morning, and the fishing boats rocked against the "
    "stone wall while gulls cried above them. Old Marten walked along the quay with a basket "
    "on his arm, counting the coins in his pocket. He had sold three crates of mackerel the "
    "day before, and the buyer from the city had promised to return by noon. Children ran "
    "past him towards the school on the hill, laughing about a dog that had stolen a loaf of "
    "bread from the baker. The baker himself stood in his doorway, shaking his head and "
    "wiping flour from his hands. Beyond the lighthouse a dark line of clouds was gathering, "
    "and Marten knew that the wind would turn before evening. He decided to mend the nets "
    "first, then carry the empty crates to the shed, and finally visit his sister, who had "
    "been ill since the beginning of the month. She lived in the yellow house beside the "
    "church, where the garden was full of roses in summer and full of crows in winter."
)
QUESTIONS = (
    "Tell me a story about a dragon and a clockmaker.",
    "Explain how photosynthesis works.",
    "Write a letter to a friend about a trip to the mountains.",
)
NUM_TOKENS = 200


def tasks(llm: LLM) -> dict[str, list[int]]:
    """Prompts by name."""
    changed = TEXT.replace("harbour", "port")
    copy = f"Text A:\n{TEXT}\n\nText B, the same with harbour changed to port:\n{changed[:60]}"
    found = {"copy": llm.get_tokenizer().encode(copy)}
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        found[f"free {number}"] = llm._template.encode(Conversation(messages=messages))
    return found


def decode(core: EngineCore, name: str, prompt: Sequence[int]) -> tuple[list[int], float]:
    """The answer's tokens, and tokens per second after the first."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    core.add_request(name, list(prompt), params)
    tokens: list[int] = []
    first = 0.0
    while core.has_work():
        for output in core.step():
            first = first or time.perf_counter()
            tokens += output.outputs[0].token_ids
    return tokens, (len(tokens) - 1) / (time.perf_counter() - first)


def compare(core: EngineCore, prompt: Sequence[int], pairs: int) -> dict[str, Any]:
    """Ratio and spread over ``pairs`` alternations, and whether the answers were equal."""
    guesser = core.scheduler.speculation
    ratios, plain, same = [], [], []
    for number in range(pairs + 1):
        core.scheduler.speculation = None
        wanted, without = decode(core, f"plain-{number}", prompt)
        core.scheduler.speculation = guesser
        found, guessed = decode(core, f"guessed-{number}", prompt)
        if number:  # the first pair warms up
            ratios.append(guessed / without)
            plain.append(without)
            same.append(found == wanted)
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "plain_tokens_per_second": statistics.median(plain),
        "equal": sum(same),
        "pairs": pairs,
    }


def main() -> None:
    """Prints a line per task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or str(default_demo_model(default_cache_folder()))
    llm = LLM(
        model,
        dtype=options.dtype,
        single_user_mode=True,
        enable_prefix_caching=False,
        max_model_len=2048,
    )
    core = llm._core
    if core.compiler is not None:
        core.compiler.compile_now()
    results = {name: compare(core, prompt, options.pairs) for name, prompt in tasks(llm).items()}
    for name, found in results.items():
        spread = f"({found['ratio_min']:.2f} to {found['ratio_max']:.2f})"
        print(
            f"{name:8} {found['ratio']:.2f} {spread}  plain "
            f"{found['plain_tokens_per_second']:.1f} tokens/s, equal {found['equal']}"
            f"/{found['pairs']}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
