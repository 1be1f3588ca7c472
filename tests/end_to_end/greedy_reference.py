"""Prompts of 5 to 1,500 tokens, and what transformers makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.request import SamplingParams

NUM_TOKENS = 24
LENGTHS = (5, 6, 8, 11, 15, 16, 17, 25, 40, 64, 90, 128, 200, 255, 256, 257, 400, 700, 1100, 1500)
TEXTS = (
    "Once upon a time, in a village by the sea, there lived a girl who",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    "La capitale de la France est Paris. La capitale de l'Italie est",
    "The three laws of thermodynamics are: 1.",
    "Ingredients: 200 g flour, 3 eggs, 1/4 l milk, a pinch of salt. Method:",
)


@dataclass(frozen=True)
class Reference:
    """A prompt and transformers' greedy answer.

    Attributes:
        prompt: Token ids.
        tokens: The ids transformers generates, end-of-sequence included.
    """

    prompt: list[int]
    tokens: list[int]


def make_prompts(model_dir: Path) -> list[list[int]]:
    """One prompt per length: a short text of its own, after as much of the licence as it takes."""
    tokenizer = load_tokenizer(model_dir)
    licence = tokenizer.encode(Path(__file__).parents[2].joinpath("LICENSE").read_text())
    prompts = []
    for index, length in enumerate(LENGTHS):
        own = tokenizer.encode(TEXTS[index % len(TEXTS)])[:length]
        filler = licence[37 * index :][: length - len(own)]
        prompts.append([*filler, *own])
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    return prompts


def transformers_model(model_dir: Path, dtype: torch.dtype) -> Any:
    """transformers' own model of the same folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


@torch.no_grad()
def answers(model_dir: Path, prompts: list[list[int]]) -> list[Reference]:
    """transformers' greedy answers in float32."""
    model = transformers_model(model_dir, torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS
        )
        found.append(Reference(prompt=prompt, tokens=out[0, len(prompt) :].tolist()))
    return found


def make_core(model_dir: Path, **options: Any) -> EngineCore:
    """An engine for the demo model in float32 on the CPU, unless ``options`` say otherwise."""
    return build_engine_core(
        EngineConfig(model=str(model_dir), device="cpu", **{"dtype": "float32", **options})
    )


def greedy(core: EngineCore, prompts: list[list[int]], together: bool) -> list[list[int]]:
    """Generated ids per prompt; all in one batch, or one after the other."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, params)
        if not together:
            drain(core, tokens)
    drain(core, tokens)
    return list(tokens.values())


def drain(core: EngineCore, tokens: dict[str, list[int]]) -> None:
    """Steps until nothing is left, collecting ids."""
    while core.has_work():
        for output in core.step():
            for piece in output.outputs:
                assert piece.error is None, piece.error
                tokens[output.request_id].extend(piece.token_ids)
