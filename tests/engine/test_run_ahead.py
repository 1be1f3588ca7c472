"""Steps begun ahead: every answer is the one that plain steps give, whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from ingle.engine.device_step import RowStart
from ingle.engine.engine_core import EngineCore
from ingle.engine.run_ahead import AHEAD, BLOCKS, DRAFTS, PROMPT, ROWS, SAMPLER, RunAhead
from ingle.engine.speculation import Speculation
from ingle.engine.streams import add_output
from ingle.request import RequestOutput, SamplingParams

NOTHING = b"never written"


class CheckingStep:
    """A device step on the cache of a checking runner: what it draws depends on what it finds in
    the slot before, so one wrong block, position or token changes every token from there on.

    A step computes when it is enqueued, as what is enqueued later on a stream sees it.
    """

    def __init__(self, runner: Any, next_token: Any, num_rows: int) -> None:
        self.num_rows = num_rows
        self.events: list[tuple[str, int]] = []  # ("run" or "read", step)
        self._runner, self._next_token = runner, next_token
        self._rows: dict[int, dict[str, Any]] = {}
        self._drawn: list[list[int]] = []

    def place(self, row: int, start: RowStart) -> None:
        assert row not in self._rows
        self._rows[row] = {
            "token": start.token_id,
            "position": start.position,
            "blocks": list(start.block_table),
            "params": start.params,
            "seed": start.seed,
        }

    def clear(self, row: int) -> None:
        del self._rows[row]

    def set_blocks(self, row: int, block_table: Any) -> None:
        self._rows[row]["blocks"] = list(block_table)

    def run(self) -> int:
        assert self._rows
        drawn = [-9] * self.num_rows
        for row, state in self._rows.items():
            drawn[row] = self._draw(state)
            state["token"] = max(drawn[row], 0)
            state["position"] += 1
        self._drawn.append(drawn)
        self.events.append(("run", len(self._drawn) - 1))
        return len(self._drawn) - 1

    def tokens(self, step: int) -> list[int]:
        self.events.append(("read", step))
        return self._drawn[step]

    def _draw(self, state: dict[str, Any]) -> int:
        before = self._runner.cache.get(self._slot(state, state["position"] - 1), NOTHING)
        token = state["token"].to_bytes(8, "little")
        history = hashlib.sha256(before + token).digest()
        self._runner.cache[self._slot(state, state["position"])] = history
        drawn: int = self._next_token(history, state["params"], state["seed"])
        return drawn

    def _slot(self, state: dict[str, Any], position: int) -> int:
        size = self._runner.block_size
        block: int = state["blocks"][position // size]
        assert 0 < block < self._runner.num_blocks
        return block * size + position % size


def begin_ahead(core: EngineCore, step: Any, block_size: int, eos: Any = (0,)) -> RunAhead:
    core.ahead = RunAhead(core.runner, step, block_size, eos)
    core.runner = core.ahead
    core.scheduler.looks_ahead = True
    return core.ahead


@pytest.fixture
def ahead_of(core_of: Any, next_token_of: Any) -> Any:
    """Makes an engine core whose steps are begun ahead; and the step."""

    def make(num_rows: int = 4, **options: Any) -> tuple[EngineCore, CheckingStep]:
        core = core_of(**options)
        step = CheckingStep(core.runner, next_token_of, num_rows)
        begin_ahead(core, step, core.scheduler.blocks.block_size)
        return core, step

    return make


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **options})


def drain(core: EngineCore, whole: dict[str, RequestOutput] | None = None) -> dict[str, Any]:
    whole = {} if whole is None else whole
    while core.has_work():
        for output in core.step():
            add_output(whole, output)
        core.scheduler.check_integrity()
    return whole


def test_a_step_is_begun_before_the_tokens_of_the_one_before_are_read(
    ahead_of: Any, undisturbed_tokens: Any
) -> None:
    core, step = ahead_of()
    core.add_request("a", [1, 2, 3], greedy())
    tokens, _ = undisturbed_tokens([1, 2, 3], greedy(), 0, 100)
    assert drain(core)["a"].outputs[0].token_ids == tokens
    first = [("run", 0)]  # after the prompt's own step, which drew the first token
    following = [pair for n in range(6) for pair in (("run", n + 1), ("read", n))]
    assert step.events == [*first, *following, ("read", 6)]
    stats = core.stats()
    assert stats.decode_steps_total == {AHEAD: 8}
    assert stats.num_rows_in_vain_total == 0  # the last token was known to be the last


def test_a_stop_costs_one_row_of_one_step(ahead_of: Any, undisturbed_tokens: Any) -> None:
    tokens, _ = undisturbed_tokens([1, 2, 3], greedy(max_tokens=30), 0, 100)
    stop = next(token for at, token in enumerate(tokens[5:], 5) if token not in tokens[:at])
    core, _ = ahead_of()
    core.add_request("a", [1, 2, 3], greedy(max_tokens=30, stop_token_ids=(stop,)))
    output = drain(core)["a"].outputs[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert output.stop_reason == stop
    assert core.stats().kv_cache_used_blocks == 0
    core.add_request("b", [1, 2, 3], greedy())  # the next step sees that nobody wants the row
    assert drain(core)["b"].outputs[0].token_ids == tokens[:8]
    assert core.stats().num_rows_in_vain_total == 1


def test_what_needs_the_host_gets_it_and_is_counted(
    ahead_of: Any, undisturbed_tokens: Any, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = ahead_of(max_num_batched_tokens=6)
    core.add_request("device", [1, 2], greedy(max_tokens=20))
    for _ in range(3):
        core.step()
    with caplog.at_level("INFO", logger="ingle.engine"):
        core.add_request("host", [4] * 9, greedy(logprobs=0))
        whole = drain(core)
    assert whole["host"].outputs[0].token_ids == undisturbed_tokens([4] * 9, greedy(), 0, 100)[0]
    wanted, _ = undisturbed_tokens([1, 2], greedy(max_tokens=20), 0, 100)
    assert whole["device"].outputs[0].token_ids == wanted[3:]
    steps = core.stats().decode_steps_total
    assert steps[SAMPLER] == 8  # as many as it has tokens
    assert steps[PROMPT] >= 1
    assert steps[AHEAD] >= 10
    said = [record for record in caplog.records if "needs the host" in record.message]
    assert len(said) == 1


def test_more_sequences_than_rows_wait_for_the_host(ahead_of: Any, undisturbed_tokens: Any) -> None:
    core, _ = ahead_of(num_rows=2)
    for name in "abc":
        core.add_request(name, [ord(name) - 96], greedy(max_tokens=6 if name == "a" else 12))
    whole = drain(core)
    for name in "abc":
        tokens, _ = undisturbed_tokens(
            [ord(name) - 96], greedy(max_tokens=6 if name == "a" else 12), 0, 100
        )
        assert whole[name].outputs[0].token_ids == tokens
    steps = core.stats().decode_steps_total
    assert steps[ROWS] >= 4
    assert steps[AHEAD] >= 4


def test_a_row_that_is_not_finite_ends_alone(ahead_of: Any, undisturbed_tokens: Any) -> None:
    core, step = ahead_of()
    core.add_request("good", [1, 2], greedy())
    core.add_request("bad", [3, 4], greedy())
    core.step()
    draw, bad = step._draw, step._rows[1]
    step._draw = lambda state: -1 if state is bad else draw(state)
    whole = drain(core)
    assert whole["bad"].outputs[0].finish_reason == "error"
    assert "not finite" in str(whole["bad"].outputs[0].error)
    tokens, _ = undisturbed_tokens([1, 2], greedy(), 0, 100)
    assert whole["good"].outputs[0].token_ids == tokens[1:]


def test_a_step_out_of_memory_is_tried_again_with_what_had_begun(
    ahead_of: Any, undisturbed_tokens: Any
) -> None:
    core, _ = ahead_of()
    core.add_request("a", [1, 2], greedy())
    whole: dict[str, RequestOutput] = {}
    for _ in range(3):
        for output in core.step():
            add_output(whole, output)

    def run_out(plan: Any) -> None:
        core.ahead.runner.before = lambda _: None
        raise MemoryError

    core.ahead.runner.before = run_out
    core.add_request("b", [3] * 5, greedy())
    drain(core, whole)
    assert whole["b"].outputs[0].finish_reason == "error"
    tokens, _ = undisturbed_tokens([1, 2], greedy(), 0, 100)
    assert whole["a"].outputs[0].token_ids == tokens


class NowAndThen:
    """Guesses in stretches, and at the first place of each while a step is in flight."""

    def __init__(self, drafter: Any, chance: random.Random) -> None:
        self._drafter, self._chance, self._is_guessing = drafter, chance, False

    def propose(self, token_ids: Any, limit: int) -> Any:
        self._is_guessing ^= self._chance.random() < 0.3
        return self._drafter.propose(token_ids, limit) if self._is_guessing else ()

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self._drafter.learn(num_drafted, num_accepted)

    def close(self) -> None:
        self._drafter.close()


@pytest.mark.parametrize("is_guessing", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_meanwhile_answers_are_undisturbed(
    ahead_of: Any, undisturbed_tokens: Any, drafter_of: Any, seed: int, is_guessing: bool
) -> None:
    """Arrivals at any step, shared beginnings, stops, ends, aborts, preemption, sampled
    sequences, chunked prompts, a cache that is too small, rows that need the host, guesses."""
    chance = random.Random(seed)
    core, step = ahead_of(
        num_rows=chance.choice((2, 4, 8)),
        num_blocks=chance.choice((14, 20, 40)),
        max_num_batched_tokens=chance.choice((8, 16, 64)),
        enable_prefix_caching=chance.random() < 0.7,
    )
    if is_guessing:
        core.scheduler.speculation = Speculation(drafter=lambda: drafter_of(None), num_tokens=4)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    whole: dict[str, RequestOutput] = {}
    aborted: set[str] = set()
    for number in range(300):
        if len(asked) < 40 and chance.random() < 0.3:
            prompt = [chance.choice((1, 2))] * chance.randint(1, 18) + [chance.randint(1, 22)]
            options: dict[str, Any] = {"max_tokens": chance.randint(1, 24)}
            if chance.random() < 0.3:
                options |= {"temperature": 1.0, "seed": chance.randint(0, 99)}
            if chance.random() < 0.3:
                options |= {"ignore_eos": False}
            if chance.random() < 0.3:
                options |= {"stop_token_ids": (chance.randint(1, 22), chance.randint(1, 22))}
            if chance.random() < 0.1:
                options |= {"logprobs": 0}
            name = f"r{number}"
            asked[name] = (prompt, greedy(**options))
            core.add_request(name, *asked[name])
            for sequence in core._groups[name].sequences if is_guessing else ():
                sequence.drafter = NowAndThen(drafter_of(sequence), chance)
        if chance.random() < 0.04 and core._groups:
            name = chance.choice(sorted(core._groups))
            aborted.add(name)
            core.abort(name)
        if core.has_work():
            for output in core.step():
                add_output(whole, output)
            core.scheduler.check_integrity()
    drain(core, whole)
    assert len(asked) == 40
    for name, (prompt, params) in asked.items():
        if name in aborted and (name not in whole or not whole[name].finished):
            continue
        tokens, reason = undisturbed_tokens(prompt, params, params.seed or 0, 100)
        answer = whole[name].outputs[0]
        assert (answer.token_ids, answer.finish_reason) == (tokens, reason), name
    stats = core.stats()
    assert stats.decode_steps_total[AHEAD] > (5 if is_guessing else 20)
    assert set(stats.decode_steps_total) <= {AHEAD, PROMPT, SAMPLER, ROWS, BLOCKS, DRAFTS}
    assert (stats.decode_steps_total.get(DRAFTS, 0) > 5) == is_guessing
    most = len(asked) + stats.num_preemptions_total + stats.num_drafts_total
    assert stats.num_rows_in_vain_total <= most
    assert stats.kv_cache_used_blocks == 0
    assert step.events
