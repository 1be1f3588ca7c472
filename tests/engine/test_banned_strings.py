"""Banned strings: no answer holds one, and each is what going back by hand gives.

The truth is written apart: whole decodes, a search in the whole text, no state, no cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from ingle.checkpoint.banned_strings import BannedStrings, fold
from ingle.checkpoint.token_bytes import BYTE_LEVEL_ALPHABET
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.output_processor import OutputProcessor
from ingle.engine.speculation import Speculation
from ingle.errors import RequestError
from ingle.llm import LLM
from ingle.request import GrammarSpec, SamplingParams

PROMPT = [7, 8, 9, 10, 11, 12, 13] * 3


def going_back(
    choose: Callable[[list[int], set[int]], int],
    text_of: Callable[[list[int]], str],
    banned: list[str],
    length: int,
) -> tuple[list[int], int]:
    """The answer by the rule itself, and how often it went back.

    ``choose`` takes the output so far and the tokens barred there; ``text_of`` decodes all of it.
    """
    output: list[int] = []
    barred: dict[int, set[int]] = {}
    num_backs = 0
    while len(output) < length:
        output.append(choose(output, barred.get(len(output), set())))
        begin = first_banned(text_of(output), banned)
        if begin is None:
            continue
        place = next(n for n in range(len(output)) if len(text_of(output[: n + 1])) > begin)
        barred = {n: ids for n, ids in barred.items() if n <= place}
        barred.setdefault(place, set()).add(output[place])
        output, num_backs = output[:place], num_backs + 1
    return output, num_backs


def first_banned(text: str, banned: list[str]) -> int | None:
    """Where the banned string begins that ends first, the longest of these."""
    low = text.lower()
    found = [
        (low.find(string.lower()) + len(string), low.find(string.lower()))
        for string in banned
        if string.lower() in low
    ]
    return min(found)[1] if found else None


@pytest.fixture(scope="module")
def letters() -> Callable[[list[int]], str]:
    return lambda ids: "".join(chr(ord("a") + i - 1) for i in ids if i)


class Truth:
    """transformers' greedy choice on the whole history, every time anew."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def choose(self, output: list[int], barred: set[int]) -> int:
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + output])).logits[0, -1]
        logits[list(barred)] = -torch.inf
        return int(logits.argmax())

    def text(self, output: list[int]) -> str:
        return self.tokenizer.decode(output, skip_special_tokens=True)


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> Truth:
    return Truth(tiny_llama)


@pytest.fixture(scope="module", params=["cached", "uncached", "chunked", "guessing"])
def llm(request: pytest.FixtureRequest, tiny_llama: Path) -> LLM:
    options: dict[str, Any] = {
        "cached": {},
        "uncached": {"enable_prefix_caching": False},
        "chunked": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        "guessing": {"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 1},
    }[request.param]
    return LLM(
        str(tiny_llama),
        dtype="float32",
        block_size=8,
        **{"speculative_model": "none", **options},
    )


def greedy(banned: list[str], **options: Any) -> SamplingParams:
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30, **options}
    return SamplingParams(banned_strings=tuple(banned), **settings)


def pieces(text: str, *lengths: int) -> list[str]:
    """Strings to ban, cut from an answer that comes without bans."""
    return [text[at : at + length].swapcase() for at, length in enumerate(lengths, start=2)]


@pytest.mark.parametrize("lengths", [(3,), (1,), (2, 5), (9,), (1, 1, 1)], ids=str)
def test_greedy_answers_are_those_of_going_back_by_hand(
    llm: LLM, truth: Truth, lengths: tuple[int, ...]
) -> None:
    (free,) = llm.generate(PROMPT, greedy([]), use_tqdm=False)
    banned = pieces(free.outputs[0].text, *lengths)
    expected, num_backs = going_back(truth.choose, truth.text, banned, 30)
    alone, *many = llm.generate([PROMPT] * 5, greedy(banned, logprobs=2), use_tqdm=False)
    assert num_backs
    for output in (alone, *many):
        answer = output.outputs[0]
        assert answer.token_ids == expected
        assert answer.text == truth.text(expected)
        assert not any(string.lower() in answer.text.lower() for string in banned)
        assert [entry.token_id for entry in answer.logprobs or ()] == expected
        assert answer.finish_reason == "length"
    core = llm._core
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0


def test_penalties_see_what_is_left_of_the_answer_and_nothing_more(llm: LLM, truth: Truth) -> None:
    def choose(output: list[int], barred: set[int]) -> int:
        with torch.no_grad():
            logits = truth.model(torch.tensor([PROMPT + output])).logits[0, -1]
        for token in set(output):
            logits[token] -= 0.5 + 0.25 * output.count(token)
        logits[list(barred)] = -torch.inf
        return int(logits.argmax())

    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    (free,) = llm.generate(PROMPT, greedy([], **penalties), use_tqdm=False)
    banned = pieces(free.outputs[0].text, 2, 3, 1)
    expected, num_backs = going_back(choose, truth.text, banned, 30)
    (output,) = llm.generate(PROMPT, greedy(banned, **penalties), use_tqdm=False)
    assert num_backs
    assert output.outputs[0].token_ids == expected


# -- on the checking runner: every slot of the cache is compared at every step ------------------


def stream(core: Any, *requests: tuple[list[int], SamplingParams]) -> Iterator[Any]:
    for number, (prompt, params) in enumerate(requests):
        core.add_request(f"r{number}", prompt, params)
    while core.has_work():
        yield from core.step()


def collected(core: Any, *requests: tuple[list[int], SamplingParams]) -> list[tuple[Any, ...]]:
    """Every answer: tokens, text, finish reason."""
    parts: dict[str, list[Any]] = {f"r{number}": [] for number in range(len(requests))}
    for output in stream(core, *requests):
        parts[output.request_id] += output.outputs
    return [
        (
            [t for p in pieces for t in p.token_ids],
            "".join(p.text for p in pieces),
            pieces[-1].finish_reason,
        )
        for pieces in parts.values()
    ]


def hashed(prompt: list[int]) -> Callable[[list[int], set[int]], int]:
    """The checking runner's choice."""
    from hashlib import sha256

    def choose(output: list[int], barred: set[int]) -> int:
        state = sha256(repr(None).encode()).digest()
        for token_id in [*prompt, *output]:
            state = sha256(state + token_id.to_bytes(8, "little")).digest()
        token = sha256(b"next" + state).digest()[0] % 23
        while token in barred:
            token = (token + 1) % 23
        return token

    return choose


def sets(letters: Any) -> list[tuple[list[int], list[str]]]:
    prompts = [[1 + n, 5, 2 + n] for n in range(8)]
    texts = [letters(going_back(hashed(p), letters, [], 20)[0]) for p in prompts]
    return [(p, pieces(text, 2, 1, 3)) for p, text in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [60, 12])
@pytest.mark.parametrize("budget", [64, 9])
@pytest.mark.parametrize("guesses", [False, True])
def test_a_batch_goes_back_each_for_itself_also_when_preempted_and_chunked(
    core_of: Any, letters: Any, caching: bool, num_blocks: int, budget: int, guesses: bool
) -> None:
    requests = sets(letters)
    core = core_of(
        num_blocks=num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=budget
    )
    if guesses:
        core.scheduler.speculation = Speculation(drafter=Repeats, num_tokens=3)
    answers = collected(core, *((p, greedy(b, max_tokens=20)) for p, b in requests))
    for (prompt, banned), (tokens, text, reason) in zip(requests, answers, strict=True):
        expected, num_backs = going_back(hashed(prompt), letters, banned, 20)
        assert num_backs
        assert (tokens, text, reason) == (expected, letters(expected), "length")
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0
    assert num_blocks == 60 or core.scheduler.num_preemptions


class Repeats:
    """Guesses the last token again, and what stood first."""

    def propose(self, token_ids: Any, limit: int) -> list[int]:
        return [token_ids[-1], token_ids[0]][:limit]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_stream_never_takes_anything_back(core_of: Any, letters: Any) -> None:
    prompt, banned = sets(letters)[0]
    expected, _ = going_back(hashed(prompt), letters, banned, 20)
    core, seen = core_of(), ""
    for output in stream(core, (prompt, greedy(banned, max_tokens=20))):
        seen += "".join(piece.text for piece in output.outputs)
        assert letters(expected).startswith(seen)
    assert seen == letters(expected)
    assert core.stats().generation_tokens_total == 20


def test_what_may_become_banned_is_held_back_and_comes_at_the_end(
    core_of: Any, letters: Any
) -> None:
    prompt = [3, 5, 4]
    free, _ = going_back(hashed(prompt), letters, [], 6)
    text = letters(free)
    banned = [text[-2:] + "never"]
    pieces = [
        output.outputs[0].text
        for output in stream(core_of(), (prompt, greedy(banned, max_tokens=6)))
        if output.outputs
    ]
    assert "".join(pieces) == text
    assert pieces[-1].endswith(text[-2:])


def test_the_last_token_of_an_answer_is_taken_back_as_any_other(core_of: Any, letters: Any) -> None:
    prompt = [3, 5, 4]
    free, _ = going_back(hashed(prompt), letters, [], 6)
    banned = [letters(free)[-2:]]
    expected, _ = going_back(hashed(prompt), letters, banned, 6)
    core = core_of()
    ((tokens, text, reason),) = collected(core, (prompt, greedy(banned, max_tokens=6)))
    assert (tokens, text, reason) == (expected, letters(expected), "length")
    assert core.scheduler.blocks.usage == 0


def test_of_a_stop_string_and_a_banned_one_the_first_to_end_counts(
    core_of: Any, letters: Any
) -> None:
    prompt = [3, 5, 4]
    text = letters(going_back(hashed(prompt), letters, [], 12)[0])
    params = greedy([text[3:8]], stop=(text[4:6],), max_tokens=12)
    assert collected(core_of(), (prompt, params))[0][1:] == (text[:4], "stop")
    params = greedy([text[3:6]], stop=(text[4:8],), max_tokens=12)
    expected, _ = going_back(hashed(prompt), letters, [text[3:6]], 12)
    assert collected(core_of(), (prompt, params))[0][0] == expected


@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_request_go_back_each_for_itself(
    core_of: Any, letters: Any, caching: bool
) -> None:
    prompt = [3, 5, 4, 9, 2]
    text = letters(going_back(hashed(prompt), letters, [], 20)[0])
    banned = [text[1:3], text[6:7]]
    core = core_of(enable_prefix_caching=caching, num_blocks=14, max_model_len=40)
    params = greedy(banned, max_tokens=20, n=4)
    expected = going_back(hashed(prompt), letters, banned, 20)[0]
    parts: dict[int, list[int]] = {}
    for output in stream(core, (prompt, params), (prompt, params)):
        for piece in output.outputs:
            parts.setdefault(piece.index, []).extend(piece.token_ids)
    assert [sorted(parts[index]) for index in range(4)] == [sorted(expected * 2)] * 4
    assert core.scheduler.blocks.usage == 0


def test_an_answer_that_cannot_avoid_a_banned_string_ends(core_of: Any) -> None:
    letters = [chr(ord("a") + n) for n in range(22)]
    core = core_of()
    params = greedy(letters, max_tokens=6, logit_bias={0: -100.0})
    ((tokens, text, reason),) = collected(core, ([3, 5, 4], params))
    assert text == ""
    assert reason in ("length", "error")
    assert len(tokens) <= 6
    assert core.scheduler.blocks.usage == 0


def test_roll_backs_are_bounded(core_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingle.engine.held_text.MIN_ROLL_BACKS", 0)
    core = core_of()
    prompt = [3, 5, 4]
    params = greedy(list("abcdefghijklmnopqrstu"), max_tokens=2)
    last = list(stream(core, (prompt, params)))[-1].outputs[0]
    assert core.runner.num_steps <= 2 + 8 + 2
    assert (last.finish_reason, last.stop_reason) == ("length", "banned_strings")
    assert core.scheduler.blocks.usage == 0


def test_an_abort_lets_out_what_was_held_and_frees_everything(core_of: Any, letters: Any) -> None:
    prompt = [3, 5, 4]
    text = letters(going_back(hashed(prompt), letters, [], 6)[0])
    core = core_of()
    core.add_request("a", prompt, greedy([text[:3] + "never"], max_tokens=50))
    for _ in range(3):
        core.step()
    output = core.abort("a")
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == letters(output.outputs[0].token_ids)
    assert core.scheduler.blocks.usage == 0


# -- vocabularies in which a character is several tokens, or a token several characters -----------

PIECES = [
    "a",
    "b",
    "c",
    "é",
    "中",
    " ",
    "ab",
    "bc",
    "é中",
    " a",
    "ca ",
    "<0xC3>",
    "<0xA9>",
    "<0xE4>",
]
PIECES += ["<0xB8>", "<0xAD>", "<0x61>", "B", "É", "aé", "d", "e"]


def spelled_out(kind: str) -> Tokenizer:
    """22 pieces behind ``<eos>``, as a byte-level or as a byte-fallback vocabulary."""
    if kind == "bytes":
        letters = {byte: letter for letter, byte in BYTE_LEVEL_ALPHABET.items()}
        raw = [
            bytes([int(p[3:5], 16)]) if p.startswith("<0x") else p.encode() for p in PIECES[:-6]
        ] + [b"B", "É".encode(), "aé".encode(), b"d\xc3", b"\xa9e", b"\xff"]
        names = ["".join(letters[byte] for byte in piece) for piece in raw]
        names[16] = letters[0x62] + letters[0x63] + letters[0x63]  # "a" is there already
    else:
        names = [piece.replace(" ", "▁") for piece in PIECES]
    vocabulary = {"<eos>": 0, **{name: at for at, name in enumerate(names, start=1)}}
    assert len(vocabulary) == 23
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=kind != "bytes")
    )
    decoders = tokenizers.decoders
    backend.decoder = (
        decoders.ByteLevel()
        if kind == "bytes"
        else decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(Path(kind), backend, {"eos_token": "<eos>"})


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@pytest.mark.parametrize("start", range(6))
def test_no_vocabulary_lets_a_banned_string_through(core_of: Any, kind: str, start: int) -> None:
    tokenizer = spelled_out(kind)
    core = core_of()
    core.tokenizer = tokenizer
    core._outputs = OutputProcessor(tokenizer)
    banned = [["É"], ["中", "ab"], ["b", "A é"], ["éa", "c", "中中"], [" ", "\ufffd"], ["a", "d"]][
        start
    ]
    prompts = [[1 + start, 2 + n] for n in range(6)]
    answers = collected(core, *((p, greedy(banned, max_tokens=25)) for p in prompts))
    for prompt, (tokens, text, reason) in zip(prompts, answers, strict=True):
        whole, before = (tokenizer.decode(ids) for ids in (prompt + tokens, prompt))
        assert len(tokens) == 25 or reason != "length"
        assert "\ufffd" in before or whole == before + text
        assert not any(string.lower() in text.lower() for string in banned)
    assert core.scheduler.blocks.usage == 0


# -- draws -------------------------------------------------------------------------------------


def test_a_token_drawn_instead_is_distributed_as_if_the_banned_one_did_not_exist() -> None:
    """Chi-square over seeds: with the old number its neighbour would always follow."""
    from ingle.sampling.sampler import Sampler, SamplingRow
    from ingle.sampling.stages import History

    sampler = Sampler([])
    weights = torch.tensor([0.3, 0.1, 0.2, 0.4])
    history = History(prompt_token_ids=(), output_token_ids=())
    params = SamplingParams()
    counts = [0.0] * 4
    for seed in range(3000):
        row = SamplingRow(params=params, seed=seed, history=history)
        (first,) = sampler(weights.log()[None].clone(), [row])
        if first.token_id != 0:
            continue
        again = SamplingRow(
            params=params, seed=seed, history=history, barred=(0,), num_roll_backs=1
        )
        (drawn,) = sampler(weights.log()[None].clone(), [again])
        counts[drawn.token_id] += 1
    total = sum(counts)
    expected = [total * weight / 0.7 for weight in (0.1, 0.2, 0.4)]
    statistic = sum((a - b) ** 2 / b for a, b in zip(counts[1:], expected, strict=True))
    assert counts[0] == 0
    assert statistic < 13.8  # 2 degrees of freedom, p = 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "seed": 3},
        {"mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "seed": 4, "temperature": 1},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01, "seed": 5, "temperature": 1},
    ],
    ids=["seeded", "mirostat", "xtc"],
)
def test_seeded_answers_do_not_depend_on_the_way(tiny_llama: Path, options: dict[str, Any]) -> None:
    """Alone, in a batch, in chunks, with guesses: the same tokens."""
    answers = []
    settings: list[dict[str, Any]] = [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 1},
    ]
    banned: list[str] = []
    for setting in settings:
        more = {"speculative_model": "none", **setting}
        llm = LLM(str(tiny_llama), dtype="float32", block_size=8, **more)
        if not banned:
            (free,) = llm.generate(PROMPT, greedy([], **options), use_tqdm=False)
            banned = pieces(free.outputs[0].text, 2, 3, 1)
        outputs = llm.generate([PROMPT] * 3, greedy(banned, **options), use_tqdm=False)
        answers += [output.outputs[0].token_ids for output in outputs]
        for output in outputs:
            text = output.outputs[0].text.lower()
            assert not any(string.lower() in text for string in banned)
    assert len({tuple(answer) for answer in answers}) == 1


def test_a_grammar_is_followed_after_going_back(tmp_path: Path, demo_model_dir: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((demo_model_dir / file).read_bytes())
    llm = LLM(str(tmp_path), dtype="float32", speculative_model="none")
    spec = GrammarSpec(kind="regex", text="(ab|ba|cd){4,8}")
    params = {"structured": spec, "ignore_eos": False, "max_tokens": 20}
    (free,) = llm.generate(PROMPT, greedy([], **params), use_tqdm=False)
    banned = [free.outputs[0].text[1:3]]
    (output,) = llm.generate(PROMPT, greedy(banned, **params), use_tqdm=False)
    answer = output.outputs[0]
    assert banned[0] not in answer.text
    assert answer.finish_reason == "stop"
    assert re.fullmatch(spec.text, answer.text)


# -- the automaton -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strings", "text", "expected"),
    [
        (["abc"], "xxABCxx", (5, 3)),
        (["b", "abc"], "abc", (2, 1)),
        (["bcd", "abcd", "d"], "abcd", (4, 4)),
        (["aab"], "aaab", (4, 3)),
        (["Straße", "ÉTÉ"], "un été", (6, 3)),
        (["ΟΔΟΣ"], "οδος", (4, 4)),
        (["İz"], "i̇z", (3, 3)),
        (["none"], "nonn", None),
    ],
)
def test_the_first_string_to_end_is_found_and_the_longest_of_these(
    strings: list[str], text: str, expected: tuple[int, int] | None
) -> None:
    automaton, state = BannedStrings(strings), 0
    found = None
    for at, character in enumerate(fold(text), start=1):
        state = automaton.step(state, character)
        if automaton.hit(state):
            found = (at, automaton.hit(state))
            break
    assert found == expected


@pytest.mark.parametrize("wrong", [("",), ("x" * 201,), ("a",) * 1025, (5,)])
def test_lists_that_cannot_be_banned_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(banned_strings=wrong)
    assert caught.value.param == "banned_strings"
