"""Speculation changes how many steps an answer takes and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ingle.config import EngineConfig
from ingle.engine.prompt_lookup import LookupLimits, PromptLookup
from ingle.engine.speculation import Speculation
from ingle.errors import ConfigError
from ingle.llm import LLM
from ingle.request import GrammarSpec, SamplingParams

LIMITS = LookupLimits(shortest=2, longest=8, num_tokens=4)
REPEATING = [7, 8, 9, 10, 11, 12, 13] * 5


class GuessesFrom:
    """Guesses the tokens of an answer that is known, every fifth of them wrongly."""

    def __init__(self, answer: list[int], num_prompt_tokens: int) -> None:
        self.answer = answer
        self.num_prompt_tokens = num_prompt_tokens

    def propose(self, token_ids: Any, limit: int) -> list[int]:
        at = len(token_ids) - self.num_prompt_tokens
        return [
            token + (number % 5 == 4)
            for number, token in enumerate(self.answer[at : at + limit], start=at)
        ]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


def tiny_llama(folder: Path, demo_model_dir: Path, vocab_size: int) -> LLM:
    """A random Llama in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return LLM(str(folder), dtype="float32", block_size=8, speculative_model="none")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> LLM:
    """A random Llama of 128 tokens."""
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"), demo_model_dir, 128)


def answer(llm: LLM, params: SamplingParams, prompt: list[int] = REPEATING) -> Any:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 4},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 5},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 6: 2.5}, "repetition_penalty": 1.2},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "seed": 6},
        {"no_repeat_ngram_size": 2, "temperature": 0.0},
        {"mirostat_mode": 2, "mirostat_tau": 3.0, "seed": 7},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01, "seed": 8},
        {"typical_p": 0.8, "tfs": 0.9, "top_a": 0.01, "seed": 9},
        {"dynatemp_min": 0.5, "dynatemp_max": 1.5, "seed": 10},
        {"seed": 11, "n": 3},
        {"seed": 12, "logprobs": 2},
        {"seed": 13, "ignore_eos": False, "min_tokens": 5},
    ],
    ids=lambda options: ",".join(options),
)
def test_every_sampler_draws_the_same_tokens_with_guesses(
    tiny: LLM, options: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **options})
    plain = answer(tiny, params)
    speculation = Speculation(
        drafter=lambda: GuessesFrom(plain[0].token_ids, len(REPEATING)), num_tokens=6
    )
    tiny._core.scheduler.speculation = speculation
    guessed = answer(tiny, params)
    tiny._core.scheduler.speculation = None
    assert [c.token_ids for c in guessed] == [c.token_ids for c in plain]
    assert [(c.text, c.finish_reason) for c in guessed] == [
        (c.text, c.finish_reason) for c in plain
    ]
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens
    for one, other in zip(plain[0].logprobs or (), guessed[0].logprobs or (), strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_grammar_is_followed_through_right_and_wrong_guesses(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    tiny = tiny_llama(tmp_path, demo_model_dir, 49152)
    spec = GrammarSpec(kind="regex", text="[a-z]{12,30}")
    params = SamplingParams(seed=1, structured=spec, max_tokens=40)
    plain = answer(tiny, params)
    tiny._core.scheduler.speculation = Speculation(
        drafter=lambda: GuessesFrom(plain[0].token_ids, len(REPEATING)), num_tokens=6
    )
    guessed = answer(tiny, params)
    assert guessed[0].token_ids == plain[0].token_ids


def test_drawn_tokens_are_distributed_as_without_guesses(tiny: LLM) -> None:
    """Chi-square of pairs of tokens, the second often drawn behind an accepted guess. The seeds
    differ between the two samples, so that equality is no matter of course."""
    top = answer(tiny, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))[0].token_ids
    counts = []
    for first_seed, drafter in ((0, None), (10_000, lambda: GuessesFrom(top, len(REPEATING)))):
        if drafter is not None:
            tiny._core.scheduler.speculation = Speculation(drafter=drafter, num_tokens=2)
        many = [
            SamplingParams(temperature=0.02, top_k=6, max_tokens=3, ignore_eos=True, seed=seed)
            for seed in range(first_seed, first_seed + 500)
        ]
        outputs = tiny.generate([REPEATING] * len(many), many, use_tqdm=False)
        pairs = [output.outputs[0].token_ids[1:] for output in outputs]
        counts.append(Counter((one * 7 + other) % 8 for one, other in pairs))
    speculation = tiny._core.scheduler.speculation
    tiny._core.scheduler.speculation = None
    assert speculation is not None
    assert speculation.num_accepted_tokens > 50
    cells = [(counts[0][cell], counts[1][cell]) for cell in range(8)]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    assert statistic < 24.3  # 7 degrees of freedom, p = 0.001


def test_a_stop_string_inside_accepted_guesses_ends_the_answer_there(
    core_of: Any, drafter_of: Any, text_of: Any
) -> None:
    core = core_of()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    llm = LLM.from_core(core)
    (plain,) = answer(llm, params, [3, 4])
    stop = text_of(plain.token_ids)[6:8]
    core.scheduler.speculation = Speculation(
        drafter=lambda: GuessesFrom(plain.token_ids, 2), num_tokens=6
    )
    (stopped,) = answer(llm, SamplingParams(temperature=0.0, stop=(stop,), ignore_eos=True), [3, 4])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == text_of(plain.token_ids).partition(stop)[0]
    assert text_of(stopped.token_ids) == stopped.text + stop
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0


def test_an_end_of_sequence_inside_accepted_guesses_is_the_last_token(bench: Any) -> None:
    scene = bench(speculating=True, num_blocks=40)
    scenes = [scene.add([1, number], ignore_eos=False, max_tokens=40) for number in range(1, 9)]
    scene.run()
    scene.assert_undisturbed(*scenes)
    scene.assert_all_free()
    assert all(sequence.drafter.closed for sequence in scenes)
    assert scene.scheduler.speculation.num_accepted_tokens > 0


def test_what_followed_the_same_tokens_before_is_guessed() -> None:
    lookup = PromptLookup(LIMITS)
    assert list(lookup.propose([1, 2, 3, 4, 9, 1, 2], 8)) == [3, 4]
    assert list(lookup.propose([1, 2, 3, 4, 9, 1, 2, 3], 8)) == [4, 9, 1]
    assert list(lookup.propose([1, 2, 3, 4, 9, 1, 2, 3, 4], 2)) == [9, 1]
    assert list(lookup.propose([1, 2, 3, 4, 9, 1, 2, 3, 4, 8], 8)) == []


def test_a_guess_that_did_not_pay_asks_for_a_longer_match() -> None:
    lookup = PromptLookup(LIMITS)
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    assert lookup.propose(tokens, 8)
    lookup.learn(2, 0)
    assert not lookup.propose(tokens, 8)
    assert lookup.propose([*tokens, 3, 4], 8)
    lookup.learn(4, 4)
    assert lookup.propose([*tokens, 3, 4, 9, 1, 2], 8)


def test_prompt_lookup_is_on_in_single_user_mode_alone_unless_asked_for() -> None:
    assert EngineConfig().drafts_from is None
    assert EngineConfig(single_user_mode=True).drafts_from == "[ngram]"
    assert EngineConfig(single_user_mode=True, speculative_model="none").drafts_from is None
    assert EngineConfig(speculative_model="[ngram]").drafts_from == "[ngram]"


@pytest.mark.parametrize("name", ["", "[gram]"])
def test_what_is_neither_a_way_of_guessing_nor_a_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-model must be"):
        EngineConfig(speculative_model=name)


def test_a_longest_match_below_the_shortest_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ngram-prompt-lookup-max is 2"):
        EngineConfig(ngram_prompt_lookup_max=2)
