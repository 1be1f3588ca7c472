"""The device's step in float32 on a CPU, eagerly in place of a captured graph: an engine that runs
ahead gives token for token what the same engine gives without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingle.attention.metadata import ForwardBatch, SequenceSpan, consecutive_start
from ingle.config import EngineConfig
from ingle.engine.device_guess import MOST_GIVEN, DeviceGuesses
from ingle.engine.device_step import RowStart
from ingle.engine.draft_start import draft_model
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.engine.graph_start import begin_running_ahead
from ingle.engine.model_runner import ModelRunner
from ingle.engine.run_ahead import AHEAD, BLOCKS, DRAFTS, SAMPLER, RunAhead
from ingle.engine.streams import add_output
from ingle.model.decoder import Decoder
from ingle.plugin.device import DeviceInfo
from ingle.request import RequestOutput, SamplingParams

pytest.importorskip("triton")

from ingle.engine import graph_step
from ingle.engine.graph_step import GraphStep, StepRows, StepSize

BLOCK = 16
PROMPTS = {
    "a": [3, 4, 5, 6, 7],
    "b": [90, *range(20, 44)],
    "c": [11] * 17,
    "d": [5, 99, 2],
}


class CPUStep(GraphStep):
    """The same step for attention that knows sequences from the host."""

    def _batch(self, rows: StepRows) -> ForwardBatch:
        size = self._size.block_size
        positions = rows.positions.tolist()
        tables = rows.blocks.tolist()
        return ForwardBatch(
            token_ids=rows.tokens.clone(),
            positions=rows.positions.clone(),
            slot_mapping=torch.tensor(
                [t[p // size] * size + p % size for t, p in zip(tables, positions, strict=True)]
            ),
            spans=tuple(
                SequenceSpan(
                    start=row,
                    stop=row + 1,
                    seq_len=position + 1,
                    block_table=table,
                    first_block=consecutive_start(table, position // size + 1),
                )
                for row, (position, table) in enumerate(zip(positions, tables, strict=True))
            ),
        )


def open_core(folder: Path, **options: Any) -> EngineCore:
    settings = {"block_size": BLOCK, "kv_cache_memory_bytes": 1 << 20, **options}
    return build_engine_core(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", enforce_eager=True, **settings
        )
    )


def begin_ahead(core: EngineCore, num_rows: int = 8) -> RunAhead:
    runner, eos = core.runner, tuple(core.scheduler.eos_token_ids)
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    num_blocks = -(-core.scheduler.max_model_len // BLOCK)
    size = StepSize(num_rows=num_rows, num_blocks=num_blocks, block_size=BLOCK)
    core.ahead = RunAhead(runner, CPUStep(runner.model, runner.caches, size), BLOCK, eos)
    core.runner = core.ahead
    core.scheduler.looks_ahead = True
    return core.ahead


def params_of(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 40, **options})


SAMPLED = {"temperature": 0.9, "seed": 7}


def answers(
    core: EngineCore,
    asked: dict[str, SamplingParams],
    *,
    spread: int = 0,
    abort: tuple[str, int] | None = None,
) -> dict[str, RequestOutput]:
    """Whole outputs; a new request every ``spread`` steps, one aborted at a step."""
    waiting = list(asked)
    whole: dict[str, RequestOutput] = {}
    number = 0
    while waiting or core.has_work():
        if waiting and (not spread or number % spread == 0):
            for name in list(waiting) if not spread else waiting[:1]:
                core.add_request(name, PROMPTS[name], asked[name])
                waiting.remove(name)
        outputs = core.step() if core.has_work() else []
        if abort is not None and number == abort[1]:
            last = core.abort(abort[0])
            outputs += [last] if last is not None else []
        for output in outputs:
            add_output(whole, output)
        core.scheduler.check_integrity()
        number += 1
    assert core.stats().kv_cache_used_blocks == 0
    return whole


def told(whole: dict[str, RequestOutput]) -> dict[str, Any]:
    return {
        name: (o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason)
        for name, o in whole.items()
    }


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> EngineCore:
    return open_core(tiny_llama)


@pytest.fixture(scope="module")
def ahead(tiny_llama: Path) -> EngineCore:
    core = open_core(tiny_llama)
    begin_ahead(core)
    return core


def test_rows_that_start_and_end_at_different_steps(plain: EngineCore, ahead: EngineCore) -> None:
    asked = {
        "a": params_of(max_tokens=70),  # more steps than random numbers lie ready for
        "b": params_of(max_tokens=90, **SAMPLED),
        "c": params_of(max_tokens=5),
        "d": params_of(max_tokens=33, **{**SAMPLED, "seed": 8}),
    }
    wanted = told(answers(plain, asked, spread=7))
    assert told(answers(ahead, asked, spread=7)) == wanted
    assert len({len(tokens) for tokens, _, _ in wanted.values()}) == 4
    steps = ahead.stats().decode_steps_total
    assert steps[AHEAD] > 80
    assert set(steps) <= {AHEAD, BLOCKS}


def test_a_greedy_row_beside_a_seeded_one_and_alone(plain: EngineCore, ahead: EngineCore) -> None:
    alone = told(answers(plain, {"a": params_of()})) | told(
        answers(plain, {"b": params_of(**SAMPLED)})
    )
    assert told(answers(ahead, {"a": params_of(), "b": params_of(**SAMPLED)})) == alone


def test_stop_strings_stop_tokens_and_the_end(plain: EngineCore, ahead: EngineCore) -> None:
    free = answers(plain, {"a": params_of(), "b": params_of(**SAMPLED), "c": params_of()})
    text = free["a"].outputs[0].text
    tokens = free["c"].outputs[0].token_ids
    eos = next(t for at, t in enumerate(tokens[6:], 6) if t not in tokens[:at])
    asked = {
        "a": params_of(stop=(text[12:15],)),
        "b": params_of(stop_token_ids=(free["b"].outputs[0].token_ids[9],), **SAMPLED),
        "c": params_of(ignore_eos=False),
        "d": params_of(),
    }
    before = ahead.stats().num_rows_in_vain_total
    for core in (plain, ahead):
        core.scheduler.eos_token_ids = frozenset({eos})
    wanted = told(answers(plain, asked))
    assert told(answers(ahead, asked)) == wanted
    for core in (plain, ahead):
        core.scheduler.eos_token_ids = frozenset()
    assert [wanted[name][2] for name in "abcd"] == ["stop", "stop", "stop", "length"]
    assert ahead.stats().num_rows_in_vain_total - before == 3  # one step late each


def test_aborts_while_a_step_is_in_flight(plain: EngineCore, ahead: EngineCore) -> None:
    asked = {"a": params_of(), "b": params_of(**SAMPLED), "c": params_of()}
    wanted = told(answers(plain, asked, abort=("b", 11)))
    assert told(answers(ahead, asked, abort=("b", 11))) == wanted
    assert wanted["b"][2] == "abort"


def test_preemption(tiny_llama: Path) -> None:
    small = {"kv_cache_memory_bytes": 11 * BLOCK * 256, "max_model_len": 96}
    asked = {
        "a": params_of(max_tokens=60),
        "b": params_of(max_tokens=60, **SAMPLED),
        "c": params_of(max_tokens=60),
    }
    plain, ahead = open_core(tiny_llama, **small), open_core(tiny_llama, **small)
    begin_ahead(ahead)
    wanted = told(answers(plain, asked))
    assert told(answers(ahead, asked)) == wanted
    assert plain.stats().num_preemptions_total > 0
    assert ahead.stats().num_preemptions_total > 0
    assert ahead.stats().decode_steps_total[AHEAD] > 30


def test_a_row_that_needs_the_host_beside_one_that_does_not(
    plain: EngineCore, ahead: EngineCore
) -> None:
    asked = {"a": params_of(), "b": params_of(top_p=0.8, **SAMPLED), "d": params_of(max_tokens=60)}
    before = ahead.stats().decode_steps_total.get(SAMPLER, 0)
    wanted = told(answers(plain, asked))
    assert told(answers(ahead, asked)) == wanted
    assert ahead.stats().decode_steps_total[SAMPLER] - before == 40


def test_guesses_take_turns_with_steps_begun_ahead(plain: EngineCore, tiny_llama: Path) -> None:
    lookup = {"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 1}
    guessing = open_core(tiny_llama, **lookup)
    begin_ahead(guessing)
    asked = {"a": params_of(max_tokens=60), "b": params_of(max_tokens=60, **SAMPLED)}
    assert told(answers(guessing, asked)) == told(answers(plain, asked))
    stats = guessing.stats()
    assert stats.num_drafts_total > 3
    assert stats.decode_steps_total[DRAFTS] > 3
    assert stats.decode_steps_total[AHEAD] > 3


def guess_on_device(core: EngineCore) -> CPUStep:
    """Lets the small model of ``core`` guess by steps of its own device."""
    assert core.draft is not None
    assert core.tokenizer is not None
    assert core.scheduler.speculation is not None
    ahead = begin_ahead(core.draft, num_rows=2)
    guesser = draft_model(core.draft, "small", core.tokenizer, core.info.vocab_size)
    core.scheduler.speculation.drafter = guesser.drafter
    assert isinstance(ahead.step, CPUStep)
    return ahead.step


@pytest.fixture
def small_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """The same model with some noise on its weights: a guesser that is right now and then."""
    tensors = load_file(tiny_llama / "model.safetensors")
    torch.manual_seed(1)
    noisy = {
        name: tensor + 0.1 * tensor.std().nan_to_num() * torch.randn_like(tensor)
        for name, tensor in tensors.items()
    }
    folder = tmp_path / "small"
    folder.mkdir()
    for path in tiny_llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(noisy, folder / "model.safetensors")
    return folder


def test_a_small_model_guesses_by_steps_of_its_own(
    plain: EngineCore, tiny_llama: Path, small_llama: Path
) -> None:
    core, waiting = (open_core(tiny_llama, speculative_model=str(small_llama)) for _ in range(2))
    step = guess_on_device(core)
    asked = {
        "a": params_of(max_tokens=60),
        "b": params_of(max_tokens=50, **SAMPLED),
        "c": params_of(max_tokens=60, top_p=0.9, seed=3, temperature=0.4),
    }
    wanted = told(answers(plain, asked))
    assert told(answers(core, asked, spread=5)) == wanted
    assert told(answers(waiting, asked, spread=5)) == wanted
    on_device, by_host = core.stats(), waiting.stats()
    assert on_device.num_draft_tokens_total == by_host.num_draft_tokens_total > 50
    assert on_device.num_accepted_tokens_total == by_host.num_accepted_tokens_total > 20
    assert step._num_steps > 50
    assert core.draft is not None
    assert core.draft.scheduler.blocks.usage == 0


@pytest.mark.parametrize("length", [1, MOST_GIVEN, MOST_GIVEN + 1, 30])
def test_all_guesses_are_enqueued_before_one_is_read(
    tiny_llama: Path, small_llama: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = open_core(tiny_llama, speculative_model=str(small_llama))
    step = guess_on_device(core)
    assert core.draft is not None
    assert core.draft.ahead is not None
    runner = core.draft.ahead.runner
    told_by: list[str] = []
    for owner, name in ((step, "run"), (step, "tokens"), (runner, "execute")):
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, name: str = name) -> Any:
            told_by.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, noted)
    assert core.scheduler.speculation is not None
    drafter = core.scheduler.speculation.drafter()
    found = drafter.propose([*range(40, 40 + length)], 6)
    assert len(found) == 4
    is_short = length <= MOST_GIVEN
    num_steps = length + 3 if is_short else 3
    wanted = [] if is_short else ["execute"]
    assert told_by == wanted + ["run"] * num_steps + ["tokens"] * (4 if is_short else 3)
    drafter.close()
    alone = open_core(small_llama)
    alone.add_request("one", [*range(40, 40 + length)], params_of(max_tokens=4))
    outputs = [output for _ in range(4) for output in alone.step()]
    assert list(found) == [token for output in outputs for token in output.outputs[0].token_ids]


@pytest.mark.parametrize(
    ("drawn", "left"), [([5, 9, 3], [5, 9, 3]), ([5, -1, 3], [5]), ([-1] * 3, [])]
)
def test_guesses_end_where_logits_are_not_finite(drawn: list[int], left: list[int]) -> None:
    class Step:
        num_rows = 1
        placed: ClassVar[list[RowStart]] = []
        num_run = 0

        def place(self, row: int, start: RowStart) -> None:
            self.placed.append(start)

        def clear(self, row: int) -> None:
            assert row == 0

        def set_blocks(self, row: int, block_table: Sequence[int]) -> None:
            raise AssertionError("a row's blocks are given when it is placed")

        def run(self) -> int:
            self.num_run += 1
            return self.num_run - 1

        def tokens(self, step: int) -> list[int]:
            return [drawn[step - 1]]  # the first step was of a known token

    step = Step()
    assert DeviceGuesses(step=step).guess([7, 8], 30, [4, 5], 3) == left
    assert [(start.token_id, start.position) for start in step.placed] == [(7, 30), (8, 31)]
    assert step.num_run == 4


CARD = DeviceInfo(type="cuda", capability=(8, 9), total_memory=24 << 30, name="a card")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enforce_eager": True}, "--enforce-eager"),
        ({}, "attention is not the paged kernel"),
    ],
)
def test_why_steps_are_no_graphs_is_said(
    plain: EngineCore,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    reason: str,
) -> None:
    config = EngineConfig(model="m", **options)
    assert isinstance(plain.runner, ModelRunner)
    with caplog.at_level("INFO", logger="ingle.engine"):
        line = begin_running_ahead(config, plain, plain.runner.model, CARD)
    assert reason in line
    assert line in caplog.text
    assert plain.ahead is None
    on_cpu = DeviceInfo(type="cpu", total_memory=1 << 30, name="a CPU")
    assert begin_running_ahead(config, plain, plain.runner.model, on_cpu) == ""


def test_a_capture_that_fails_leaves_the_engine_as_it_was(
    plain: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: GraphStep) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    assert isinstance(plain.runner, ModelRunner)
    monkeypatch.setattr(graph_step, "why_not", lambda model, caches: "")
    monkeypatch.setattr(GraphStep, "capture", fail)
    monkeypatch.setattr(GraphStep, "is_card", property(lambda step: True))
    config = EngineConfig(model="m")
    line = begin_running_ahead(config, plain, plain.runner.model, CARD)
    assert "capturing one failed with operation not permitted when stream is capturing." in line
    assert plain.ahead is None
    assert not plain.scheduler.looks_ahead
