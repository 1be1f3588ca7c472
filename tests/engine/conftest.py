"""A model that is a pure function of the token history, with a cache checked slot by slot."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.block_manager import BlockManager
from ingle.engine.engine_core import EngineCore
from ingle.engine.info import EngineInfo
from ingle.engine.scheduler import Scheduler, SchedulerLimits
from ingle.engine.sequence import Sequence as EngineSequence
from ingle.engine.speculation import Speculation
from ingle.engine.step import ModelRunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from ingle.request import FinishReason, SamplingParams, TokenLogprob

VOCAB_SIZE = 23
EOS = 0


def histories(token_ids: Sequence[int], salt: str | None) -> Iterator[bytes]:
    """One value per position that depends on every token up to there: what keys and values are."""
    state = hashlib.sha256(repr(salt).encode()).digest()
    for token_id in token_ids:
        state = hashlib.sha256(state + token_id.to_bytes(8, "little")).digest()
        yield state


def next_token(
    history: bytes, params: SamplingParams, seed: int, barred: Collection[int] = ()
) -> int:
    """The token after a history; the next one that is not barred."""
    seeded = history + (b"" if params.greedy else seed.to_bytes(16, "little", signed=True))
    token_id = hashlib.sha256(b"next" + seeded).digest()[0] % VOCAB_SIZE
    while token_id in barred and len(barred) < VOCAB_SIZE:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


@dataclass
class CheckingRunner:
    """Runs plans as the real runner does, on a cache of slots, and distrusts every plan.

    Every position a plan counts as computed must hold what the whole history up to it says; every
    new one is written once, into a block nobody else uses. So any error in block tables, prefix
    matches, copies or preemption shows at once.
    """

    block_size: int
    num_blocks: int
    max_tokens: int = 10**9
    cache: dict[int, bytes] = field(default_factory=dict)
    row_error: Callable[[ScheduledRequest], str | None] = lambda _: None
    before: Callable[[SchedulerOutput], None] = lambda _: None
    num_steps: int = 0
    num_copies: int = 0
    num_computed: int = 0
    plans: list[SchedulerOutput] = field(default_factory=list)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        self.plans.append(plan)
        assert 0 < plan.num_tokens <= self.max_tokens
        self._copy(plan)
        self.before(plan)
        written: set[int] = set()
        for item in plan.scheduled:
            self._write(item, written)
        output = ModelRunnerOutput()
        for item in plan.scheduled:
            self._read(item, output)
        return output

    def _copy(self, plan: SchedulerOutput) -> None:
        tables = [block for item in plan.scheduled for block in item.block_table]
        for source, target in plan.block_copies:
            assert source != target
            assert tables.count(target) == 1
            self.num_copies += 1
            for offset in range(self.block_size):
                value = self.cache.get(source * self.block_size + offset, b"never written")
                self.cache[target * self.block_size + offset] = value

    def _slot(self, item: ScheduledRequest, position: int) -> int:
        block = item.block_table[position // self.block_size]
        assert 0 < block < self.num_blocks
        return block * self.block_size + position % self.block_size

    def _write(self, item: ScheduledRequest, written: set[int]) -> None:
        known = len(item.prompt_token_ids) + len(item.output_token_ids)
        tokens = [*item.prompt_token_ids, *item.output_token_ids, *item.draft_token_ids]
        assert item.samples or not item.draft_token_ids
        assert len(item.token_ids) > 0
        assert list(item.token_ids) == tokens[item.num_computed_tokens : item.seq_len]
        assert item.samples == (item.seq_len - item.num_draft_tokens == known)
        states = list(histories(tokens[: item.seq_len], item.params.cache_salt))
        for position in range(item.num_computed_tokens, item.seq_len):
            slot = self._slot(item, position)
            assert slot not in written
            written.add(slot)
            self.cache[slot] = states[position]
            self.num_computed += 1

    def _read(self, item: ScheduledRequest, output: ModelRunnerOutput) -> None:
        tokens = [*item.prompt_token_ids, *item.output_token_ids, *item.draft_token_ids]
        states = list(histories(tokens[: item.seq_len], item.params.cache_salt))
        for position, history in enumerate(states):
            found = self.cache.get(self._slot(item, position))
            assert found == history, f"{item.request_id}: position {position} holds something else"
        error = self.row_error(item)
        if error is not None:
            output.errors[item.request_id] = error
        elif item.samples:
            first, *more = self._draw(item, states[len(states) - 1 - item.num_draft_tokens :])
            output.sampled[item.request_id] = first
            output.followers[item.request_id] = more

    def _draw(self, item: ScheduledRequest, states: list[bytes]) -> Iterator[SampledToken]:
        """Tokens behind the known ones and behind each guess, up to the first that is wrong."""
        guesses = [*item.draft_token_ids, None]
        place = len(item.output_token_ids)
        for at, (history, guess) in enumerate(zip(states, guesses, strict=True), start=place):
            barred = item.bans.get(at, ())
            token_id = next_token(history, item.params, item.seed, barred)
            logprob = TokenLogprob(token_id=token_id, logprob=-1.0, rank=1)
            yield SampledToken(token_id=token_id, logprob=logprob)
            if token_id != guess:
                return


class HalfRightDrafter:
    """Guesses what will be drawn, and sometimes wrongly."""

    def __init__(self, sequence: EngineSequence) -> None:
        self.sequence = sequence
        self.closed = False

    def propose(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        tokens = list(token_ids)
        params = self.sequence.params
        for _ in range(min(limit, 5)):
            *_, history = histories(tokens, params.cache_salt)
            wrong = history[0] % 4 == 0
            tokens.append((next_token(history, params, self.sequence.seed) + wrong) % VOCAB_SIZE)
        return tokens[len(token_ids) :]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted

    def close(self) -> None:
        self.closed = True


class Silent:
    """Guesses nothing."""

    def propose(self, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        return ()

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        raise AssertionError("it guessed nothing")

    def close(self) -> None:
        pass


def undisturbed(
    prompt: Sequence[int], params: SamplingParams, seed: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """The tokens a request gets when nothing else happens, and why they end."""
    output: list[int] = []
    while True:
        *_, history = histories([*prompt, *output], params.cache_salt)
        output.append(next_token(history, params, seed))
        if len(output) >= params.min_tokens:
            if output[-1] == EOS and not params.ignore_eos:
                return output, "stop"
            if output[-1] in params.stop_token_ids:
                return output, "stop"
        at_end = params.max_tokens is not None and len(output) >= params.max_tokens
        if at_end or len(prompt) + len(output) >= max_model_len:
            return output, "length"


class Bench:
    """A scheduler and its checking runner, driven by hand."""

    def __init__(
        self,
        *,
        num_blocks: int = 9,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 1000,
        enable_prefix_caching: bool = True,
        speculating: bool = False,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching
        )
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.scheduler = Scheduler(self.blocks, limits, {EOS})
        if speculating:
            self.scheduler.speculation = Speculation(drafter=Silent, num_tokens=4)
        self.runner = CheckingRunner(block_size, num_blocks, max_num_batched_tokens)
        self.num_added = 0

    def sequence(
        self,
        prompt: Sequence[int],
        leader: EngineSequence | None = None,
        seed: int = 0,
        **params: object,
    ) -> EngineSequence:
        """A new sequence that the scheduler does not know yet."""
        self.num_added += 1
        settings = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})  # type: ignore[arg-type]
        room = self.scheduler.max_model_len - len(prompt)
        wanted = room if settings.max_tokens is None else settings.max_tokens
        return EngineSequence(
            sequence_id=f"s{self.num_added}",
            request_id=f"r{self.num_added}",
            index=0,
            prompt_token_ids=list(prompt),
            params=settings,
            seed=seed,
            max_tokens=min(room, wanted),
            order=self.num_added,
            leader=leader,
        )

    def add(self, prompt: Sequence[int], **params: object) -> EngineSequence:
        """A new sequence, queued."""
        sequence = self.sequence(prompt, **params)  # type: ignore[arg-type]
        self.queue(sequence)
        return sequence

    def queue(self, sequence: EngineSequence) -> None:
        """Hands a sequence to the scheduler, with a drafter when it speculates."""
        self.scheduler.add(sequence)
        if self.scheduler.speculation is not None:
            sequence.drafter = HalfRightDrafter(sequence)

    def step(self) -> list[EngineSequence]:
        """Runs one step; the sequences with news."""
        plan = self.scheduler.schedule()
        outcome = self.runner.execute(plan) if plan.scheduled else ModelRunnerOutput()
        progress = self.scheduler.update(plan, outcome)
        self.scheduler.check_integrity()
        return [news.sequence for news in progress]

    def run(self) -> None:
        """Steps until everything has ended."""
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    def expected(self, sequence: EngineSequence) -> tuple[list[int], FinishReason]:
        """What the sequence must come to when it is let finish."""
        return undisturbed(
            sequence.prompt_token_ids,
            sequence.params,
            sequence.seed,
            self.scheduler.max_model_len,
        )

    def assert_undisturbed(self, *sequences: EngineSequence) -> None:
        """Asserts that each has finished with the tokens of an undisturbed run."""
        for sequence in sequences:
            assert (sequence.output_token_ids, sequence.finish_reason) == self.expected(sequence)

    def assert_all_free(self) -> None:
        """Asserts that nobody holds a block."""
        self.scheduler.check_integrity()
        assert self.blocks.num_free_blocks == self.blocks.num_blocks - 1
        assert self.blocks.usage == 0
        assert not self.blocks.pending_copies


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Makes a scheduler with a checking runner."""
    return Bench


@pytest.fixture
def checking_runner() -> type[CheckingRunner]:
    """The runner's class."""
    return CheckingRunner


@pytest.fixture
def next_token_of() -> Callable[..., int]:
    """``next_token``."""
    return next_token


@pytest.fixture
def undisturbed_tokens() -> Callable[..., tuple[list[int], FinishReason]]:
    """``undisturbed``."""
    return undisturbed


def letters_tokenizer() -> Tokenizer:
    """Token 0 is ``<eos>``, tokens 1 to 22 are the letters ``a`` to ``v``."""
    letters = string.ascii_lowercase[: VOCAB_SIZE - 1]
    vocabulary = {"<eos>": EOS, **{letter: i for i, letter in enumerate(letters, start=1)}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(Path("letters"), backend, {"eos_token": "<eos>"})


def letters_of(token_ids: Sequence[int]) -> str:
    """Their text, spelled by hand."""
    return "".join(string.ascii_lowercase[i - 1] for i in token_ids if i != EOS)


def make_core(
    *,
    num_blocks: int = 40,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 100,
    enable_prefix_caching: bool = True,
    max_queue_len: int | None = None,
) -> EngineCore:
    """An engine core on a checking runner."""
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    return EngineCore(
        Scheduler(blocks, limits, {EOS}),
        CheckingRunner(block_size, num_blocks, max_num_batched_tokens),
        letters_tokenizer(),
        EngineInfo(model="letters", max_model_len=max_model_len, vocab_size=VOCAB_SIZE),
        max_queue_len,
        seed=7,
    )


@pytest.fixture
def core_of() -> Callable[..., EngineCore]:
    """Makes an engine core on a checking runner."""
    return make_core


@pytest.fixture
def drafter_of() -> Callable[[EngineSequence], HalfRightDrafter]:
    """Makes a drafter for a sequence."""
    return HalfRightDrafter


@pytest.fixture
def text_of() -> Callable[[Sequence[int]], str]:
    """``letters_of``."""
    return letters_of


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Path:
    """A random Llama of 128 tokens, saved by transformers."""
    import torch
    import transformers

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
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else None
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return folder
