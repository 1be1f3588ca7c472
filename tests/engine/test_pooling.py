"""Pooled hidden states equal transformers', however the prompt is cut up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ingle.llm import LLM
from ingle.request import RequestOutput, SamplingParams

PROMPT = torch.randint(0, 128, (75,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def hidden(tiny_llama: Path) -> torch.Tensor:
    """transformers' last hidden states, [T, E]."""
    model = transformers.AutoModel.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([PROMPT])).last_hidden_state[0]
    return states


def pooled(llm: LLM, pooling: str, **options: int) -> RequestOutput:
    params = SamplingParams(pooling=pooling, temperature=0.0, **{"max_tokens": 0, **options})
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return output


@pytest.mark.parametrize("chunk", [16, 512])
def test_both_poolings_equal_transformers(
    tiny_llama: Path, hidden: torch.Tensor, chunk: int
) -> None:
    llm = LLM(
        str(tiny_llama), dtype="float32", block_size=16, device="cpu", max_num_batched_tokens=chunk
    )
    for _ in range(2):  # the second time the prefix cache knows the prompt
        for pooling, wanted in (("mean", hidden.mean(0)), ("last", hidden[-1])):
            output = pooled(llm, pooling)
            torch.testing.assert_close(torch.tensor(output.embedding), wanted, atol=2e-5, rtol=1e-4)
            assert output.finished
            assert output.outputs[0].token_ids == []
    assert len(pooled(llm, "mean", max_tokens=3).outputs[0].token_ids) == 3
