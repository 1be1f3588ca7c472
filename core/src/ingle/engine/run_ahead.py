"""Runs a plan's steps one ahead: the next one is enqueued before this one's tokens are read.

What runs ahead is a step of tokens that the device itself draws (``graph_step``). The scheduler
knows nothing of it: it plans step n + 1 from token n as always, and finds that step begun. When its
plan says something else, because a sequence ended, was put out or aborted, that row's share of the
step was in vain: what it wrote lies past the sequence's computed tokens, and whoever gets those
slots writes them later on the same stream.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ingle.engine.device_step import DeviceStep, RowStart, draws_on_device
from ingle.engine.step import (
    ModelRunnerOutput,
    Runner,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)

logger = logging.getLogger("ingle.engine")

AHEAD: Final = "ahead"
"""The next step was begun before this one's tokens were read."""
PROMPT: Final = "prompt"
"""It was not: a prompt is only partly computed, and goes on in the next step."""
SAMPLER: Final = "sampler"
"""It was not: somebody's tokens can't be drawn on the device."""
DRAFTS: Final = "drafts"
"""It was not: guesses were checked in this step, and more may follow in the next."""
ROWS: Final = "rows"
"""It was not: there are more sequences than rows."""
BLOCKS: Final = "blocks"
"""It was not: somebody lacks the block for it."""
NOT_FINITE: Final = "the model's logits for this request are not finite"


@dataclass(slots=True, kw_only=True)
class RowInFlight:
    """A row of the step that was enqueued last.

    Attributes:
        row: Which.
        token_id: What the step computes; -1 until it is known.
        position: Where.
        block: In which block.
        num_blocks: Blocks that the device knows of.
    """

    row: int
    token_id: int
    position: int
    block: int
    num_blocks: int

    def is_what(self, item: ScheduledRequest, block_size: int) -> bool:
        """Whether it computes just what a plan asks for."""
        return (
            list(item.token_ids) == [self.token_id]
            and item.num_computed_tokens == self.position
            and item.samples
            and item.block_table[self.position // block_size] == self.block
        )


class RunAhead:
    """A runner that enqueues a decode step before the tokens of the one before it are read.

    Args:
        runner: Runs everything else: prompts, and steps that need the host.
        step: The device's own step.
        block_size: Tokens per block.
        eos_token_ids: The model's.
    """

    def __init__(
        self, runner: Runner, step: DeviceStep, block_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.runner = runner
        self.next_steps: Counter[str] = Counter()
        self.num_rows_in_vain = 0
        self.step = step
        self._block_size = block_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._free = list(range(step.num_rows))  # a heap: low rows first, for the smallest graph
        self._rows: dict[str, RowInFlight] = {}  # of the step in flight
        self._number = 0  # the step in flight's
        self._said: set[str] = set()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """As ``ModelRunner.execute``."""
        begun = {
            item.request_id: self._rows[item.request_id].row
            for item in plan.scheduled
            if item.request_id in self._rows
            and self._rows[item.request_id].is_what(item, self._block_size)
        }
        number = self._number
        others = tuple(item for item in plan.scheduled if item.request_id not in begun)
        output = ModelRunnerOutput()
        if others or plan.block_copies:
            output = self.runner.execute(replace(plan, scheduled=others))
        for name in [name for name in self._rows if name not in begun]:
            self._release(name)
            self.num_rows_in_vain += 1
        self._begin_next(plan.scheduled, output)
        if begun:
            drawn = self.step.tokens(number)
            for name, row in begun.items():
                self._learn(name, drawn[row], output)
        return output

    def _begin_next(self, items: Sequence[ScheduledRequest], output: ModelRunnerOutput) -> None:
        """Enqueues the step after this one, if every row of it can be."""
        reason = self._reason(items)
        self.next_steps[reason] += 1
        if reason != AHEAD:
            for name in list(self._rows):
                self._release(name)
            return
        for item in items:
            if item.request_id in self._rows:
                self._move_on(item)
            elif item.request_id in output.sampled and not _surely_ends(item):
                self._place(item, output.sampled[item.request_id].token_id)
        if self._rows:
            self._number = self.step.run()

    def _reason(self, items: Sequence[ScheduledRequest]) -> str:
        if not all(item.samples for item in items):
            return PROMPT
        if any(item.num_draft_tokens for item in items):
            return DRAFTS
        if len(items) > self.step.num_rows:
            return ROWS
        for item in items:
            if item.request_id not in self._rows and not self._draws_on_device(item):
                self._say(
                    SAMPLER, f"Request {item.request_id!r} draws its tokens in a way that needs"
                )
                return SAMPLER
        size = self._block_size
        if any(len(item.block_table) * size <= item.seq_len for item in items):
            return BLOCKS
        return AHEAD

    def _draws_on_device(self, item: ScheduledRequest) -> bool:
        if item.bans or item.num_roll_backs:
            return False
        return draws_on_device(item.params, self._eos_token_ids)

    def _say(self, reason: str, what: str) -> None:
        """Says once, not for every token, that steps wait for the host."""
        if reason not in self._said:
            self._said.add(reason)
            logger.info(
                "%s the host: no step is begun ahead while it runs (said once; "
                "ingle_decode_steps_total counts them)",
                what,
            )

    def _place(self, item: ScheduledRequest, token_id: int) -> None:
        row, table, position = heapq.heappop(self._free), item.block_table, item.seq_len
        self._rows[item.request_id] = RowInFlight(
            row=row,
            token_id=token_id,
            position=position,
            block=table[position // self._block_size],
            num_blocks=len(table),
        )
        start = RowStart(
            token_id=token_id,
            position=position,
            block_table=table,
            params=item.params,
            seed=item.seed,
            num_output=len(item.output_token_ids) + 1,
        )
        self.step.place(row, start)

    def _move_on(self, item: ScheduledRequest) -> None:
        """Makes a row of the step in flight one of the next."""
        if _surely_ends(item):
            self._release(item.request_id)
            return
        flying, table = self._rows[item.request_id], item.block_table
        if len(table) != flying.num_blocks:
            self.step.set_blocks(flying.row, table)
            flying.num_blocks = len(table)
        flying.position += 1
        flying.block = table[flying.position // self._block_size]
        flying.token_id = -1

    def _learn(self, name: str, token_id: int, output: ModelRunnerOutput) -> None:
        """Takes in what a row drew: it is what the step in flight computes, if the row is in it."""
        if token_id < 0:
            output.errors[name] = NOT_FINITE
            return
        output.sampled[name] = SampledToken(token_id=token_id)
        if name in self._rows:
            self._rows[name].token_id = token_id

    def _release(self, name: str) -> None:
        row = self._rows.pop(name).row
        self.step.clear(row)
        heapq.heappush(self._free, row)


def _surely_ends(item: ScheduledRequest) -> bool:
    """Whether this step's token is the request's last, whatever it is."""
    return item.max_tokens is not None and len(item.output_token_ids) + 1 >= item.max_tokens
