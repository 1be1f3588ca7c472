"""``LLM`` as vLLM's offline class: prompts of every form in, finished outputs out, in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingle.checkpoint.chat_template import Conversation
from ingle.errors import ConfigError, EngineDeadError, RequestError
from ingle.llm import LLM
from ingle.request import SamplingParams

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, **options})


@pytest.fixture
def llm(core_of: Any) -> LLM:
    return LLM.from_core(core_of())


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abc", [[1, 2, 3]]),
        (["abc", "d"], [[1, 2, 3], [4]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt": "ab"}, [[1, 2]]),
        ([{"prompt_token_ids": [5]}, {"prompt": "a"}, "b", [4]], [[5], [1], [2], [4]]),
        ([], []),
    ],
)
def test_prompts_come_in_every_form(llm: LLM, prompts: Any, expected: list[list[int]]) -> None:
    outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == expected
    assert all(output.finished for output in outputs)


def test_outputs_are_whole_and_in_order(llm: LLM, undisturbed_tokens: Any, text_of: Any) -> None:
    prompts = [[n + 1] * (20 - n) for n in range(15)]
    params = [greedy(max_tokens=15 - n) for n in range(15)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, settings, output in zip(prompts, params, outputs, strict=True):
        tokens, _ = undisturbed_tokens(prompt, settings, 0, 100)
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].text == text_of(tokens)
        assert output.outputs[0].finish_reason == "length"


def test_completions_of_a_family_are_in_order(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(n=4, max_tokens=30), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert output.prompt == "abc"


def test_more_prompts_than_the_queue_takes_are_fed_as_it_empties(core_of: Any) -> None:
    llm = LLM.from_core(core_of(max_num_seqs=2, max_queue_len=3))
    outputs = llm.generate([[1 + n % 9] for n in range(50)], greedy(), use_tqdm=False)
    assert len(outputs) == 50


def test_a_wrong_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    for prompts in (["abc", ""], [[1], [99]], [{"text": "abc"}], ["a", {"prompt": 5}]):
        with pytest.raises(RequestError):
            llm.generate(prompts, greedy(), use_tqdm=False)
    with pytest.raises(RequestError, match="one for all"):
        llm.generate(["a", "b"], [greedy()], use_tqdm=False)
    assert llm._core.runner.num_steps == 0  # type: ignore[attr-defined]
    assert len(llm.generate("abc", greedy(), use_tqdm=False)) == 1


def test_an_interrupt_leaves_nothing_in_the_engine(llm: LLM) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    llm._core.runner.before = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "d"], greedy(), use_tqdm=False)
    assert not llm._core.has_work()
    llm._core.runner.before = lambda _: None  # type: ignore[attr-defined]
    assert len(llm.generate("abc", greedy(), use_tqdm=False)) == 1
    llm._core.scheduler.check_integrity()
    assert llm._core.stats().kv_cache_used_blocks == 0


def test_a_failed_step_is_raised(llm: LLM) -> None:
    def fail(_: Any) -> None:
        raise ValueError

    llm._core.runner.before = fail  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError):
        llm.generate("abc", greedy(), use_tqdm=False)


def test_defaults_are_the_models_own(core_of: Any) -> None:
    core = core_of()
    object.__setattr__(
        core.info, "generation_defaults", {"temperature": 0.0, "top_k": 7, "max_new_tokens": 99}
    )
    llm = LLM.from_core(core)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 7, 16)
    assert len(llm.generate("abc", use_tqdm=False)[0].outputs) == 1


def test_chats_go_through_the_models_template(core_of: Any, tmp_path: Path) -> None:
    config = {"chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    core = core_of()
    core.tokenizer.config = config
    object.__setattr__(core.info, "model_path", str(tmp_path))
    llm = LLM.from_core(core)
    ids = llm.get_tokenizer().encode
    one = [{"role": "user", "content": "cde"}]
    two = [*one, {"role": "assistant", "content": "fg"}]
    (output,) = llm.chat(one, greedy(), use_tqdm=False)
    assert output.prompt_token_ids == ids("ucdea")
    both = llm.chat([one, two], greedy(), use_tqdm=False)
    assert [o.prompt_token_ids for o in both] == [ids("ucdea"), ids("ucdeafga")]
    (continued,) = llm.chat(two, greedy(), use_tqdm=False, continue_final_message=True)
    assert continued.prompt_token_ids == ids("ucdeafg")
    (plain,) = llm.chat(
        Conversation(messages=one, add_generation_prompt=False), greedy(), use_tqdm=False
    )
    assert plain.prompt_token_ids == ids("ucde")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="no option tensor_parallel_sise"):
        LLM("model", tensor_parallel_sise=2)
