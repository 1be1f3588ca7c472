"""A cache format that core has never heard of, in an installed package, serves unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ingle.request import SamplingParams


@pytest.fixture(scope="module")
def tiny_model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the demo model's tokenizer."""
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=512, **shape, **heads)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model_dir / name).read_bytes())
    return folder


CACHES = ["fixed16", "k=fixed16,v=int8"]
OTHERS = ["fp8_e4m3", "fp8_e5m2", "int8", "k=int8,v=int4"]


def answers(model: Path, prompts: list[list[int]], cache: str, **options: Any) -> list[list[int]]:
    from ingle.llm import LLM

    given = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "block_size": 16}
    llm = LLM(str(model), kv_cache_dtype=cache, **{**given, **options})
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "cache", [*CACHES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_company_chunks_prefixes_and_preemption_change_no_answer(
    stranger: None, tiny_model: Path, cache: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(1, 9000, (40,), generator=generator).tolist()
    prompts = [[*shared, 100 + i, *range(7, 7 + 5 * i)] for i in range(16)]
    alone = [answers(tiny_model, [p], cache)[0] for p in (prompts[0], prompts[15])]
    for options in (
        {"max_num_batched_tokens": 2048},
        {"max_num_batched_tokens": 16},
        {"num_blocks_asked": 24},
    ):
        together = answers(tiny_model, prompts, cache, **memory(cache, options))
        assert [together[0], together[15]] == alone, options


def memory(cache: str, options: dict[str, int]) -> dict[str, Any]:
    """Room for few blocks, so that sixteen sequences displace each other."""
    if "num_blocks_asked" not in options:
        return dict(options)
    return {
        "kv_cache_memory_bytes": options["num_blocks_asked"] * 2 * 2 * 16 * 2 * 16 * 2,
        "max_model_len": 144,
    }
