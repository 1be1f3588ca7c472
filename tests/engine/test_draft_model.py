"""A small model that guesses changes how many steps an answer takes and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ingle.config import EngineConfig
from ingle.engine.block_manager import BlockManager
from ingle.engine.draft_model import FIRST_GUESS, DraftModel
from ingle.engine.engine import build_engine_core
from ingle.errors import ConfigError
from ingle.llm import LLM
from ingle.request import GrammarSpec, SamplingParams

PROMPT = [7, 8, 9, 10, 11, 12, 13] * 5


def save(folder: Path, model: Any, demo_model_dir: Path) -> str:
    """A model folder with the demo model's tokenizer."""
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return str(folder)


def tiny_llama(vocab_size: int = 128) -> Any:
    """A random Llama."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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
    )


def shaken(model: Any) -> Any:
    """The same with some noise on its weights: a guesser that is right now and then."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.15 * weight.std().nan_to_num() * torch.randn_like(weight)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> tuple[str, str]:
    """A model, and a smaller one that resembles it."""
    root = tmp_path_factory.mktemp("models")
    big = save(root / "big", tiny_llama(), demo_model_dir)
    return big, save(root / "small", shaken(tiny_llama()), demo_model_dir)


@pytest.fixture(scope="module")
def plain(folders: tuple[str, str]) -> LLM:
    """The model alone."""
    return LLM(folders[0], dtype="float32", block_size=8)


@pytest.fixture(scope="module")
def guessed(folders: tuple[str, str]) -> LLM:
    """The model with the small one beside it."""
    return LLM(folders[0], dtype="float32", block_size=8, speculative_model=folders[1])


def counts(llm: LLM) -> tuple[int, int]:
    """Tokens guessed and tokens right so far; every block of both caches is free."""
    stats = llm._core.stats()
    assert llm._core.scheduler.blocks.usage == 0
    assert llm._core.draft is not None
    assert llm._core.draft.scheduler.blocks.usage == 0
    return stats.num_draft_tokens_total, stats.num_accepted_tokens_total


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 4},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 5},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 6: 2.5}, "repetition_penalty": 1.2},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "seed": 6, "temperature": 0.3},
        {"no_repeat_ngram_size": 2, "temperature": 0.0},
        {"mirostat_mode": 2, "mirostat_tau": 3.0, "seed": 7},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01, "seed": 8},
        {"typical_p": 0.8, "tfs": 0.9, "top_a": 0.01, "seed": 9},
        {"seed": 11, "n": 3, "temperature": 0.2},
        {"seed": 13, "ignore_eos": False, "min_tokens": 5, "logprobs": 2},
    ],
    ids=lambda options: ",".join(options),
)
def test_every_sampler_draws_the_same_tokens(
    plain: LLM, guessed: LLM, options: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **options})
    before = counts(guessed)
    (wanted,) = plain.generate(PROMPT, params, use_tqdm=False)
    (found,) = guessed.generate(PROMPT, params, use_tqdm=False)
    assert [c.token_ids for c in found.outputs] == [c.token_ids for c in wanted.outputs]
    assert [c.finish_reason for c in found.outputs] == [c.finish_reason for c in wanted.outputs]
    drafted, accepted = (new - old for new, old in zip(counts(guessed), before, strict=True))
    assert drafted > 0
    assert found.times is not None
    assert found.times.num_draft_tokens == drafted
    assert found.times.num_accepted_tokens == accepted


def test_greedy_guesses_are_often_right_and_save_steps(plain: LLM, guessed: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    before = counts(guessed)
    (found,) = guessed.generate(PROMPT, params, use_tqdm=False)
    drafted, accepted = (new - old for new, old in zip(counts(guessed), before, strict=True))
    assert 20 < accepted < drafted
    assert found.outputs[0].token_ids == (
        plain.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    )


def test_many_sequences_answer_as_without_guesses(plain: LLM, guessed: LLM) -> None:
    params = [
        SamplingParams(temperature=0.5, seed=seed, max_tokens=20 + seed, ignore_eos=True)
        for seed in range(9)
    ]
    prompts = [PROMPT[seed:] for seed in range(9)]
    wanted = plain.generate(prompts, params, use_tqdm=False)
    found = guessed.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    counts(guessed)


def test_drawn_tokens_are_distributed_as_without_guesses(plain: LLM, guessed: LLM) -> None:
    """Chi-square of pairs of tokens over different seeds, so that equality is no matter of
    course."""
    found = []
    before = counts(guessed)
    for llm, first in ((plain, 0), (guessed, 10_000)):
        params = [
            SamplingParams(temperature=0.02, top_k=6, max_tokens=3, ignore_eos=True, seed=seed)
            for seed in range(first, first + 400)
        ]
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        pairs = [output.outputs[0].token_ids[1:] for output in outputs]
        found.append(Counter((one * 7 + other) % 8 for one, other in pairs))
    assert counts(guessed)[1] - before[1] > 20
    cells = [(found[0][cell], found[1][cell]) for cell in range(8)]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    assert statistic < 24.3  # 7 degrees of freedom, p = 0.001


def test_a_grammar_is_followed(tmp_path: Path, demo_model_dir: Path) -> None:
    big = save(tmp_path / "big", tiny_llama(49152), demo_model_dir)
    spec = GrammarSpec(kind="regex", text="[a-z]{12,30}")
    params = SamplingParams(seed=1, structured=spec, max_tokens=40)
    answers = []
    for name in ("none", big):
        llm = LLM(big, dtype="float32", speculative_model=name)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_guesses_end_where_the_small_models_context_ends(
    folders: tuple[str, str], tmp_path: Path, plain: LLM
) -> None:
    small = tmp_path / "short"
    small.mkdir()
    for path in Path(folders[1]).iterdir():
        (small / path.name).write_bytes(path.read_bytes())
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    core = build_engine_core(
        EngineConfig(model=folders[0], dtype="float32", block_size=8, speculative_model=str(small))
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (found,) = LLM.from_core(core).generate(PROMPT, params, use_tqdm=False)
    (wanted,) = plain.generate(PROMPT, params, use_tqdm=False)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert found.times is not None
    assert 0 < found.times.num_draft_tokens <= 3 * (48 - len(PROMPT))


def test_a_small_model_with_other_tokens_is_refused(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    for path in Path(folders[1]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = (next(t for t, i in vocab.items() if i == number) for number in (500, 501))
    vocab[one], vocab[other] = 501, 500
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another vocabulary: its token 500 is"):
        LLM(folders[0], dtype="float32", speculative_model=str(tmp_path))


def test_every_place_of_the_small_models_cache_holds_what_the_tokens_say(
    checking_runner: Any,
) -> None:
    """The runner checks every plan it is given against the whole history of its cache."""
    blocks = BlockManager(24, 4, enable_prefix_caching=False)
    runner = checking_runner(block_size=4, num_blocks=24)
    model = DraftModel(runner, blocks, 80, max_num_batched_tokens=7, vocab_size=23)
    drafters = [model.drafter() for _ in range(2)]
    tokens = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5]]
    for number in range(20):
        for drafter, known in zip(drafters, tokens, strict=True):
            guess = list(drafter.propose(known, 10))
            kept = min(number % 4, len(guess))
            drafter.learn(len(guess), kept)
            known += [*guess[:kept], (number * 7) % 23]
    assert len(drafters[0].propose(tokens[0], 10)) <= 80 - len(tokens[0])
    for drafter in drafters:
        drafter.close()
    assert blocks.usage == 0


def test_a_guess_is_as_long_as_the_last_one_was_good(checking_runner: Any) -> None:
    blocks = BlockManager(24, 4, enable_prefix_caching=False)
    runner = checking_runner(block_size=4, num_blocks=24)
    model = DraftModel(runner, blocks, 80, max_num_batched_tokens=64, vocab_size=23)
    drafter, known = model.drafter(), [1, 2, 3]
    sizes = []
    for kept in (4, 6, 0, 1, 2):
        guess = list(drafter.propose(known, 12))
        sizes.append(len(guess))
        drafter.learn(len(guess), kept)
        known += [*guess[:kept], 0]
    assert sizes == [FIRST_GUESS, 6, 8, 1, 3]


def test_a_token_that_the_small_model_does_not_know_ends_its_guesses(checking_runner: Any) -> None:
    blocks = BlockManager(24, 4, enable_prefix_caching=False)
    runner = checking_runner(block_size=4, num_blocks=24)
    model = DraftModel(runner, blocks, 80, max_num_batched_tokens=64, vocab_size=20)
    assert list(model.drafter().propose([1, 22, 3], 4)) == []
