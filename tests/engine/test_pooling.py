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
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Path:
    """A random Llama of 128 tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny-llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((demo_model_dir / file).read_bytes())
    return path


@pytest.fixture(scope="module")
def hidden(folder: Path) -> torch.Tensor:
    """transformers' last hidden states, [T, E]."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([PROMPT])).last_hidden_state[0]
    return states


def pooled(llm: LLM, pooling: str, **options: int) -> RequestOutput:
    params = SamplingParams(pooling=pooling, temperature=0.0, **{"max_tokens": 0, **options})
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return output


@pytest.mark.parametrize("chunk", [16, 512])
def test_both_poolings_equal_transformers(folder: Path, hidden: torch.Tensor, chunk: int) -> None:
    llm = LLM(
        str(folder), dtype="float32", block_size=16, device="cpu", max_num_batched_tokens=chunk
    )
    for _ in range(2):  # the second time the prefix cache knows the prompt
        for pooling, wanted in (("mean", hidden.mean(0)), ("last", hidden[-1])):
            output = pooled(llm, pooling)
            torch.testing.assert_close(torch.tensor(output.embedding), wanted, atol=2e-5, rtol=1e-4)
            assert output.finished
            assert output.outputs[0].token_ids == []
    assert len(pooled(llm, "mean", max_tokens=3).outputs[0].token_ids) == 3
