"""Guesses what comes next with a small model of the same vocabulary. No torch here.

The small model continues each sequence greedily, in a cache of its own; what it guessed is checked
in the big model's next step like any other guess (Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Final

from ingle.engine.block_manager import BlockManager
from ingle.engine.device_guess import GREEDY, MOST_GIVEN, MOST_GUESSED, DeviceGuesses
from ingle.engine.sequence import Sequence
from ingle.engine.step import Runner, ScheduledRequest, SchedulerOutput
from ingle.errors import CapacityError

FIRST_GUESS: Final = 4
"""Tokens in a sequence's first guess; how many of them are right decides about the next."""
SLACK: Final = 1
"""A guess is this much longer than what the last one gained."""


class DraftModel:
    """The small model, shared by all sequences.

    Args:
        runner: Runs it.
        blocks: Its cache's blocks, without prefix reuse.
        max_model_len: Tokens of a sequence at most.
        max_num_batched_tokens: Tokens of a step at most.
        vocab_size: Tokens that both models know: ids below this.
        on_device: Guesses by steps that stay on the device; None: each waits for the one before.
    """

    def __init__(
        self,
        runner: Runner,
        blocks: BlockManager,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        on_device: DeviceGuesses | None = None,
    ) -> None:
        self._on_device = on_device
        self._runner = runner
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocab_size = vocab_size
        self._num_drafters = 0

    def drafter(self) -> ModelDrafter:
        """The drafter of a new sequence."""
        self._num_drafters += 1
        return ModelDrafter(self, f"draft-{self._num_drafters}")

    def lane(self, name: str) -> Sequence:
        """A sequence of this model's own, with nothing in it."""
        return Sequence(
            sequence_id=name,
            request_id=name,
            index=0,
            prompt_token_ids=[],
            params=GREEDY,
            seed=0,
            max_tokens=self._max_model_len,
        )

    def guess(self, lane: Sequence, count: int) -> list[int]:
        """At most ``count`` tokens that this model puts behind the ones of ``lane``; fewer, or
        none, where memory, context or vocabulary end."""
        guesses: list[int] = []
        count = min(count, self._max_model_len - lane.num_tokens)
        if any(token >= self._vocab_size for token in lane.token_ids[lane.num_computed_tokens :]):
            return guesses
        if self._on_device is not None and count > 0 and self._blocks.grow(lane):
            return self._guess_on_device(self._on_device, lane, min(count, MOST_GUESSED))
        while len(guesses) < count and self._blocks.grow(lane):
            token = self._next(lane)
            if token is None or token >= self._vocab_size:
                break
            guesses.append(token)
            lane.append(token)
        return guesses

    def free(self, lane: Sequence) -> None:
        """Takes a lane's blocks back."""
        self._blocks.free(lane)
        lane.num_computed_tokens = 0

    def _guess_on_device(self, device: DeviceGuesses, lane: Sequence, count: int) -> list[int]:
        """The same, all steps but those of many known tokens enqueued before a token is read."""
        guesses: list[int] = []
        if lane.num_tokens - lane.num_computed_tokens > MOST_GIVEN:
            token = self._next(lane)
            if token is None or token >= self._vocab_size:
                return guesses
            guesses.append(token)
            lane.append(token)
            count -= 1
            if not count or not self._blocks.grow(lane):
                return guesses
        known = lane.token_ids[lane.num_computed_tokens :]
        # a guess is computed for the next one: there is none after the last
        count = 1 + self._blocks.grow_for_drafts(lane, count - 1, headroom=0)
        drawn = device.guess(known, lane.num_computed_tokens, lane.block_table, count)
        for token in drawn:
            if token >= self._vocab_size:
                break
            lane.num_computed_tokens = lane.num_tokens
            guesses.append(token)
            lane.append(token)
        return guesses

    def _next(self, lane: Sequence) -> int | None:
        """Computes what is known and not computed yet, and gives the likeliest token behind it."""
        while True:
            known = lane.token_ids[lane.num_computed_tokens :][: self._max_num_batched_tokens]
            samples = lane.num_computed_tokens + len(known) == lane.num_tokens
            share = ScheduledRequest(
                request_id=lane.sequence_id,
                token_ids=known,
                num_computed_tokens=lane.num_computed_tokens,
                block_table=lane.block_table,
                params=GREEDY,
                seed=0,
                prompt_token_ids=(),
                output_token_ids=lane.token_ids,
                samples=samples,
            )
            try:
                outcome = self._runner.execute(SchedulerOutput(scheduled=(share,)))
            except (MemoryError, CapacityError):
                return None
            lane.num_computed_tokens += len(known)
            if samples:
                drawn = outcome.sampled.get(lane.sequence_id)
                return None if drawn is None else drawn.token_id


class ModelDrafter:
    """One sequence's guesses. They are longer while they are right, and shorter when not."""

    def __init__(self, model: DraftModel, name: str) -> None:
        self._model = model
        self._lane = model.lane(name)
        self._count = FIRST_GUESS
        self._num_known = 0  # leading tokens of the lane that are no guesses

    def propose(self, token_ids: SequenceOf[int], limit: int) -> SequenceOf[int]:
        """At most ``limit`` tokens that may follow ``token_ids``, which begins with what it was
        before, guesses apart."""
        lane = self._lane
        same = _num_equal(lane.token_ids, token_ids, self._num_known)
        # The last token's own logits are wanted, even where a guess was computed already.
        lane.num_computed_tokens = min(lane.num_computed_tokens, same, len(token_ids) - 1)
        lane.token_ids[:] = token_ids
        self._num_known = len(token_ids)
        return self._model.guess(lane, min(limit, self._count))

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Says what came of the last guess."""
        if num_accepted == num_drafted:
            self._count = max(self._count, num_drafted + SLACK + 1)
        else:
            self._count = num_accepted + SLACK

    def close(self) -> None:
        """Gives back its blocks."""
        self._model.free(self._lane)


def _num_equal(one: SequenceOf[int], other: SequenceOf[int], known: int) -> int:
    """How many leading tokens are equal; the first ``known`` are."""
    at, most = known, min(len(one), len(other))
    while at < most and one[at] == other[at]:
        at += 1
    return at
