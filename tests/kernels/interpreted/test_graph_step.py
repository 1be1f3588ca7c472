"""What a captured decode step holds, run in the interpreter on a model of one layer: the tokens of
plain steps, drawn on the device and fed back there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_engine import open_on_card, share

from ingle.engine.device_step import RowStart, draws_on_device
from ingle.engine.engine_core import EngineCore
from ingle.engine.graph_step import RING, GraphStep, StepRows, StepSize, empty_rows, why_not
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import SchedulerOutput
from ingle.model.decoder import Decoder
from ingle.request import GrammarSpec, SamplingParams
from ingle.sampling.uniform import uniform

pytestmark = pytest.mark.usefixtures("installed_plugins")

BLOCK = 16
NUM_STEPS = 3
ROWS = (
    ([*range(3, 17)], SamplingParams(temperature=0.0), 0),  # the third step begins a block
    ([*range(90, 61, -1)], SamplingParams(temperature=0.7), 5),
)
EAGER_TABLES, GRAPH_TABLES = ((1, 2), (3, 4, 5)), ((8, 6), (11, 9, 7))


@pytest.fixture
def core(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """An engine that takes the CPU for a card."""
    return open_on_card(checkpoint, monkeypatch, enforce_eager=True)


def execute(runner: ModelRunner, number: int, tokens: list[int], start: int, table: Any) -> int:
    """One plain step of row ``number``: the token it draws."""
    prompt, params, seed = ROWS[number]
    item = share(str(number), tokens, start, list(table))
    values = {name: getattr(item, name) for name in item.__slots__}
    values |= {"params": params, "seed": seed, "prompt_token_ids": prompt}
    values["output_token_ids"] = tokens[len(prompt) :]
    plan = SchedulerOutput(scheduled=(type(item)(**values),))
    return runner.execute(plan).sampled[str(number)].token_id


def plain_tokens(runner: ModelRunner, number: int, table: Any) -> list[int]:
    """The prompt's first drawn token, and those of the steps after it."""
    prompt = ROWS[number][0]
    tokens = [*prompt, execute(runner, number, prompt, 0, table)]
    for _ in range(NUM_STEPS):
        tokens.append(execute(runner, number, tokens, len(tokens) - 1, table))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_the_steps_of_a_graph_draw_what_plain_steps_draw(core: EngineCore) -> None:
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    assert why_not(runner.model, runner.caches) == ""
    wanted = [plain_tokens(runner, number, EAGER_TABLES[number]) for number in range(2)]
    size = StepSize(num_rows=3, num_blocks=4, block_size=BLOCK)
    assert isinstance(runner.model, Decoder)
    step = GraphStep(runner.model, runner.caches, size)
    for row, number in ((0, 0), (2, 1)):  # row 1 stays empty
        prompt, params, seed = ROWS[number]
        first = execute(runner, number, prompt, 0, GRAPH_TABLES[number])
        assert first == wanted[number][0]
        start = RowStart(
            token_id=first,
            position=len(prompt),
            block_table=GRAPH_TABLES[number],
            params=params,
            seed=seed,
            num_output=1,
        )
        step.place(row, start)
    numbers = [step.run() for _ in range(NUM_STEPS)]  # all enqueued before one is read
    drawn = [step.tokens(number) for number in numbers]
    assert [row[0] for row in drawn] == wanted[0][1:]
    assert [row[2] for row in drawn] == wanted[1][1:]
    step.clear(0)
    assert step.tokens(step.run())[2] >= 0


def run_requests(core: EngineCore) -> dict[str, list[int]]:
    """Two requests, the second a step later."""
    found: dict[str, list[int]] = {"0": [], "1": []}
    for number in range(2):
        prompt, params, seed = ROWS[number]
        wanted = replace(params, seed=seed, max_tokens=4 - number, ignore_eos=True)
        core.add_request(str(number), prompt, wanted)
        for output in core.step():
            found[output.request_id] += output.outputs[0].token_ids
    while core.has_work():
        for output in core.step():
            found[output.request_id] += output.outputs[0].token_ids
    return found


def test_an_engine_on_a_card_runs_ahead_and_says_so(
    checkpoint: Path,
    core: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert core.ahead is None
    assert core.info.load_report.endswith("Decode steps are no CUDA graphs: --enforce-eager.")
    ahead = open_on_card(checkpoint, monkeypatch)
    assert "Decode steps are CUDA graphs, begun one ahead" in ahead.info.load_report
    assert run_requests(ahead) == run_requests(core)
    assert ahead.stats().decode_steps_total["ahead"] >= 3


@pytest.mark.slow
def test_a_small_models_guesses_are_its_own_steps(
    checkpoint: Path,
    core: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guessing = open_on_card(checkpoint, monkeypatch, speculative_model=str(checkpoint))
    assert guessing.draft is not None
    assert guessing.draft.ahead is not None
    step = guessing.draft.ahead.step
    assert isinstance(step, GraphStep)
    found = []
    for one in (guessing, core):
        one.add_request("0", ROWS[0][0], replace(ROWS[0][1], max_tokens=9, ignore_eos=True))
        outputs = []
        while one.has_work():
            outputs += one.step()
        found.append([token for output in outputs for token in output.outputs[0].token_ids])
    assert found[0] == found[1]
    # Guesses of four tokens and of two, all right; the first of the four came with the prompt.
    assert guessing.stats().num_accepted_tokens_total == 6
    assert step._num_steps == 3 + 3


@pytest.mark.slow
def test_random_numbers_come_ahead_faults_are_marked_and_refusals_named(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    size = StepSize(num_rows=2, num_blocks=4, block_size=BLOCK)
    step = GraphStep(runner.model, runner.caches, size)
    used: list[float] = []

    def body(rows: StepRows) -> None:
        used.append(float(rows.numbers[0, int(rows.positions[0]) % RING]))
        rows.positions.add_(rows.moves)

    monkeypatch.setattr(step, "_body", body)
    params = SamplingParams(temperature=1.0)
    start = RowStart(token_id=1, position=9, block_table=[1], params=params, seed=7, num_output=3)
    step.place(0, start)
    for _ in range(3 * RING):
        step.run()
    assert used == [uniform(7, 3 + number) for number in range(3 * RING)]
    step.clear(0)
    logits = torch.zeros(2, 128)
    logits[0, 5], logits[1, 3] = float("nan"), 1.0
    assert step._draw(empty_rows(size, step.device), logits).tolist() == [-1, 3]
    assert "own decoder" in why_not(object(), runner.caches)
    monkeypatch.setattr(type(runner.caches[0].k_store), "paged", lambda store: None)
    assert "not read in place" in why_not(runner.model, runner.caches)


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.8, "seed": 3}, True),
        ({"temperature": 1.0}, True),
        ({"top_p": 0.9}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "logprobs": 1}, False),
        ({"temperature": 0.0, "structured": GrammarSpec(kind="regex", text="a")}, False),
        ({"mirostat_mode": 2, "mirostat_tau": 3.0}, False),
        ({"temperature": 0.0, "banned_strings": ["a"]}, False),
    ],
)
def test_what_needs_the_host_is_told_apart(options: dict[str, Any], possible: bool) -> None:
    assert draws_on_device(SamplingParams(**options), (2,)) == possible
