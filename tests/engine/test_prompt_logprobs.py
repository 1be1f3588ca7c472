"""Log-probabilities of prompt tokens equal what transformers says, however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ingle.llm import LLM
from ingle.request import RequestOutput, SamplingParams, TokenLogprob

PROMPT = torch.randint(0, 128, (75,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> torch.Tensor:
    """transformers' log-probabilities after each token of PROMPT: [T, V]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", block_size=16, device="cpu", **options)


def judged(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> RequestOutput:
    params = {"temperature": 0.0, "prompt_logprobs": 3, "max_tokens": 4, **options}
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def assert_right(output: RequestOutput, wanted: torch.Tensor) -> None:
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert len(rest) == len(output.prompt_token_ids) - 1
    for position, entry in enumerate(rest, start=1):
        assert isinstance(entry, TokenLogprob)
        row = wanted[position - 1]
        assert entry.token_id == output.prompt_token_ids[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        values, ids = row.topk(3)
        assert [token_id for token_id, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [7, 16, 2048])
def test_they_equal_transformers_in_one_step_and_in_many(
    tiny_llama: Path, wanted: torch.Tensor, chunk: int
) -> None:
    output = judged(engine(tiny_llama, max_num_batched_tokens=chunk, max_num_seqs=4))
    assert_right(output, wanted)
    assert len(output.outputs[0].token_ids) == 4


def test_a_prompt_that_is_cached_is_computed_again(tiny_llama: Path, wanted: torch.Tensor) -> None:
    llm = engine(tiny_llama)
    judged(llm, prompt_logprobs=None)
    again = judged(llm)
    assert again.num_cached_tokens == 0
    assert_right(again, wanted)
    assert judged(llm, prompt_logprobs=None).num_cached_tokens > 60


def test_a_prompt_can_be_judged_without_going_on(tiny_llama: Path, wanted: torch.Tensor) -> None:
    llm = engine(tiny_llama, max_model_len=len(PROMPT), max_num_batched_tokens=32)
    output = judged(llm, max_tokens=0)
    assert_right(output, wanted)
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"


def test_a_family_reports_its_prompt_once(tiny_llama: Path, wanted: torch.Tensor) -> None:
    llm = engine(tiny_llama)
    output = judged(llm, n=3, temperature=1.0, seed=1)
    assert_right(output, wanted)
    assert [len(completion.token_ids) for completion in output.outputs] == [4, 4, 4]
    assert_right(judged(llm, n=3, temperature=1.0, max_tokens=0), wanted)


def test_neighbours_do_not_change_them(tiny_llama: Path, wanted: torch.Tensor) -> None:
    llm = engine(tiny_llama, max_num_batched_tokens=40)
    prompts = [PROMPT[:20], PROMPT, [1, 2, 3], PROMPT[:50], [7]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=None if i == 2 else 3)
        for i in range(5)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[2].prompt_logprobs is None
    assert outputs[4].prompt_logprobs == [None]
    for output in (*outputs[:2], outputs[3]):
        assert_right(output, wanted)


def test_a_preempted_request_still_reports_every_token_once(
    tiny_llama: Path, wanted: torch.Tensor
) -> None:
    block = 2 * 2 * 16 * 2 * 8 * 4  # layers, sides, tokens, heads, head size, bytes
    llm = engine(
        tiny_llama,
        max_model_len=128,
        kv_cache_memory_bytes=12 * block,
        max_num_batched_tokens=24,
    )
    params = SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=3)
    outputs = llm.generate([PROMPT, PROMPT, PROMPT], params, use_tqdm=False)
    assert llm._core.scheduler.num_preemptions > 0
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    for output in outputs:
        assert_right(output, wanted)


def test_a_prompt_with_logits_that_are_no_numbers_ends_alone(tiny_llama: Path) -> None:
    llm = engine(tiny_llama, max_num_batched_tokens=256)
    runner: Any = llm._core.runner
    real = runner.model

    class Poisoned:
        """A model that knows no answer after token 5."""

        def hidden_states(self, batch: Any, caches: Any) -> torch.Tensor:
            hidden: torch.Tensor = real.hidden_states(batch, caches).clone()
            hidden[batch.token_ids == 5] = float("nan")
            return hidden

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = real.logits(hidden)
            return logits

    runner.model = Poisoned()
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
    bad, good = llm.generate([[1, 5, 9], [1, 6, 9]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in str(bad.outputs[0].error)
    assert good.outputs[0].finish_reason in ("length", "stop")
