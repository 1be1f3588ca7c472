"""One rule: each step, every sequence's computed tokens catch up with its known tokens.

There is no prefill and no decode phase. Chunked prefill, prefix reuse and preemption are that rule
under a budget of tokens. No torch here.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ingle.engine.block_manager import BlockManager
from ingle.engine.sequence import Sequence, SequenceStatus
from ingle.engine.speculation import Speculation
from ingle.engine.step import ModelRunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from ingle.request import FinishReason

HEADROOM = 0.01
"""Share of the blocks that admission leaves to running sequences, so that a sequence let in is not
put out again at the next block border."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How much may happen in a step.

    Attributes:
        max_num_seqs: Sequences computed together at most.
        max_num_batched_tokens: Tokens computed in one step at most.
        max_model_len: Tokens per sequence at most, prompt and output together.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one sequence: a token, more that were guessed right, an end, or several of these."""

    sequence: Sequence
    sampled: SampledToken | None = None
    followers: tuple[SampledToken, ...] = ()

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """All new tokens."""
        return () if self.sampled is None else (self.sampled, *self.followers)


class Scheduler:
    """Decides which tokens are computed next and when a sequence is over.

    Running sequences come first, oldest first, then waiting ones. Without a free block the
    youngest running sequence is preempted: it keeps its output, gives up its blocks and computes
    them again later.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        eos_token_ids: Collection[int] = (),
        speculation: Speculation | None = None,
    ) -> None:
        self.blocks = blocks
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.speculation = speculation
        self.max_model_len = min(limits.max_model_len, blocks.capacity_tokens)
        self.running: list[Sequence] = []  # oldest first
        self.waiting: deque[Sequence] = deque()
        # Whether the runner may begin a step before it is planned: it needs the block for it then.
        self.looks_ahead = False
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._live: dict[str, Sequence] = {}
        self._preempted: list[str] = []
        self._ended: list[Progress] = []  # ended without a step, reported by update

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the queue. One of no tokens ends at once."""
        self._live[sequence.sequence_id] = sequence
        self.waiting.append(sequence)
        if self.speculation is not None:
            sequence.drafter = self.speculation.drafter()
        if sequence.max_tokens == 0 and not (sequence.judges_prompt or sequence.pools_prompt):
            self.finish(sequence, "length")
            self._ended.append(Progress(sequence))

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """Ends a sequence and frees its blocks. One that has ended only takes the new reason."""
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        if self._live.pop(sequence.sequence_id, None) is None:
            return
        if sequence.drafter is not None:
            sequence.drafter.close()
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        if reason == "error":
            self.blocks.discard(sequence)  # whatever went wrong may be in the cache
        else:
            self.blocks.free(sequence)

    def finish_all(self, error: str) -> None:
        """Ends everything and frees all blocks, whatever state a failed step has left."""
        for sequence in self._live.values():
            sequence.finish_reason, sequence.error = "error", error
            sequence.status, sequence.block_table = SequenceStatus.FINISHED, []
            if sequence.drafter is not None:
                sequence.drafter.close()
        self._live.clear()
        self.running.clear()
        self.waiting.clear()
        self._ended.clear()
        self.blocks.reset()

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step's plan. Empty when there is nothing to compute."""
        self._preempted = []
        scheduled: list[ScheduledRequest] = []
        budget = self._schedule_running(scheduled, self.limits.max_num_batched_tokens)
        if not self._preempted:
            self._schedule_waiting(scheduled, budget)
        return SchedulerOutput(
            scheduled=tuple(scheduled),
            block_copies=self.blocks.pending_copies,
            preempted_request_ids=tuple(self._preempted),
        )

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Plans running sequences and returns what is left of the budget.

        Every younger one keeps a token of the budget, so that a long prompt stalls nobody.
        """
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            if not self._make_room(sequence):
                continue  # it was the last in the list and is out of it
            at += 1
            limit = budget - (len(self.running) - at)
            share = _share(sequence, limit, self._drafts(sequence, limit - 1))
            scheduled.append(share)
            budget -= len(share.token_ids)
        return budget

    def _drafts(self, sequence: Sequence, limit: int) -> SequenceOf[int]:
        """Guesses that fit the budget, the sequence's end and its blocks; nobody gives way."""
        if sequence.drafter is None or self.speculation is None:
            return ()
        if sequence.num_remaining_tokens != 1 or not sequence.output_token_ids:
            return ()
        longest = min(len(sequence.prompt_token_ids) + sequence.max_tokens, self.max_model_len)
        limit = min(limit, self.speculation.num_tokens, longest - sequence.num_tokens - 1)
        drafts = sequence.drafter.propose(sequence.token_ids, limit) if limit > 0 else ()
        if not drafts:
            return ()
        room = self.blocks.grow_for_drafts(sequence, len(drafts), len(self.running))
        return drafts[:room]

    def _make_room(self, sequence: Sequence) -> bool:
        """Gets a running sequence its next block, preempting; False when it had to give way."""
        while not self.blocks.grow(sequence):
            youngest = self.running[-1]
            if len(self.running) == 1:
                self._end_for_lack_of_blocks(sequence)
            else:
                self._preempt(youngest)
            if youngest is sequence:
                return False
        self._look_ahead(sequence)
        return True

    def _look_ahead(self, sequence: Sequence) -> None:
        """Gives a sequence the block that the step after this one needs, if one is to spare."""
        if self.looks_ahead:
            self.blocks.grow_for_drafts(sequence, 1, len(self.running))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self._preempted.append(sequence.sequence_id)
        self.num_preemptions += 1

    def _end_for_lack_of_blocks(self, sequence: Sequence) -> None:
        """Ends a sequence that has the cache to itself and still does not fit."""
        if sequence.output_token_ids:
            self.finish(sequence, "length")
        else:
            message = (
                f"The prompt has {sequence.num_tokens} tokens and the KV cache holds "
                f"{self.blocks.capacity_tokens}. Shorten it, or enlarge the cache with "
                "--kv-cache-memory-bytes."
            )
            self.finish(sequence, "error", error=message)
        self._ended.append(Progress(sequence))

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Admits waiting sequences in order; one that does not fit holds up those behind it."""
        held_back: list[Sequence] = []
        # Every running sequence took a token, so there are never more of them than tokens.
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if self._leader_is_computing(sequence):
                held_back.append(self.waiting.popleft())
                continue
            if not self._admit(sequence):
                if self.running:
                    break
                self._end_for_lack_of_blocks(sequence)
                continue
            self._look_ahead(sequence)
            share = _share(sequence, budget)
            scheduled.append(share)
            budget -= len(share.token_ids)
        self.waiting.extendleft(reversed(held_back))

    def _leader_is_computing(self, sequence: Sequence) -> bool:
        """Whether the family's first sequence will soon have the prompt in the cache for all."""
        leader = sequence.leader
        if leader is None or not self.blocks.enable_prefix_caching:
            return False
        return not (leader.finished or leader.prompt_computed)

    def _admit(self, sequence: Sequence) -> bool:
        """Moves the head of the queue to the running ones, with blocks for all its tokens."""
        headroom = max(1, int(self.blocks.num_blocks * HEADROOM)) if self.running else 0
        if not self.blocks.allocate(sequence, headroom):
            return False
        self.waiting.popleft()
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=lambda running: running.order)
        if not sequence.admitted:
            sequence.admitted = True
            sequence.admitted_time = time.monotonic()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.prefix_cache_queries += sequence.num_tokens
            self.prefix_cache_hits += sequence.num_computed_tokens
        return True

    # -- learning what came of it ----------------------------------------------------------------

    def update(self, plan: SchedulerOutput, outcome: ModelRunnerOutput) -> list[Progress]:
        """Takes in a step's results: news of every sequence that got a token or ended."""
        self.blocks.commit_copies()
        progress, self._ended = self._ended, []
        for share in plan.scheduled:
            sequence = self._live[share.request_id]
            sampled = outcome.sampled.get(share.request_id)
            error = outcome.errors.get(share.request_id)
            if error is None and share.samples and sampled is None:
                error = "The model runner returned no token."
            if error is not None:
                self.finish(sequence, "error", error=error)
                progress.append(Progress(sequence))
                continue
            sequence.prompt_logprobs += outcome.prompt_logprobs.get(share.request_id, ())
            _add_pooled(sequence, share, outcome)
            self._advance(sequence, len(share.token_ids) - share.num_draft_tokens)
            if share.samples and sampled is not None:
                self._append(sequence, sampled.token_id)
                followers = self._follow(sequence, share, outcome)
                progress.append(Progress(sequence, sampled, followers))
            elif sequence.max_tokens == 0 and sequence.prompt_computed:
                self.finish(sequence, "length")
                progress.append(Progress(sequence))
        return progress

    def _follow(
        self, sequence: Sequence, share: ScheduledRequest, outcome: ModelRunnerOutput
    ) -> tuple[SampledToken, ...]:
        """Takes in what was drawn behind right guesses, up to the sequence's end. Keys and values
        of wrong ones lie beyond its computed tokens and are overwritten."""
        if not share.num_draft_tokens:
            return ()
        drawn, taken = outcome.followers.get(share.request_id, []), 0
        if sequence.drafter is not None and self.speculation is not None:
            sequence.drafter.learn(share.num_draft_tokens, len(drawn))
            self.speculation.count(share.num_draft_tokens, len(drawn))
            sequence.num_draft_tokens += share.num_draft_tokens
            sequence.num_accepted_tokens += len(drawn)
        for token in drawn:
            if sequence.finished:
                break
            self._advance(sequence, 1)
            self._append(sequence, token.token_id)
            taken += 1
        return tuple(drawn[:taken])

    def fail_newest(self, plan: SchedulerOutput, error: str) -> list[Progress]:
        """Ends the youngest sequence of a step that ran out of memory; the others try again."""
        progress, self._ended = self._ended, []
        newest = max((self._live[s.request_id] for s in plan.scheduled), key=lambda s: s.order)
        self.finish(newest, "error", error=error)
        return [*progress, Progress(newest)]

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.num_computed_tokens += num_tokens
        caught_up = sequence.num_computed_tokens == sequence.num_tokens
        ends_prompt = caught_up and not sequence.prompt_computed
        if ends_prompt or sequence.num_computed_tokens // self.blocks.block_size > (
            sequence.num_indexed_blocks
        ):
            self.blocks.index(sequence, with_tail=ends_prompt)
        sequence.prompt_computed |= caught_up

    def _append(self, sequence: Sequence, token_id: int) -> None:
        """Adds a generated token and ends the sequence where it has to end."""
        sequence.append(token_id)
        params, num_output = sequence.params, len(sequence.output_token_ids)
        may_stop = num_output >= params.min_tokens
        if may_stop and token_id in self.eos_token_ids and not params.ignore_eos:
            self.finish(sequence, "stop")
        elif may_stop and token_id in params.stop_token_ids:
            self.finish(sequence, "stop", stop_reason=token_id)
        elif num_output >= sequence.max_tokens or sequence.num_tokens >= self.max_model_len:
            self.finish(sequence, "length")

    def revive(self, sequence: Sequence) -> None:
        """Puts a sequence that runs or has just ended back at the head of the queue."""
        if sequence.finished:
            self._live[sequence.sequence_id] = sequence
        else:
            self.running.remove(sequence)
            self.blocks.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless queues and blocks agree."""
        queued = [*self.running, *self.waiting]
        if len(queued) != len(self._live) or {s.sequence_id for s in queued} != set(self._live):
            raise RuntimeError("queues and live sequences disagree")
        if any(s.status is not SequenceStatus.RUNNING for s in self.running) or any(
            s.status is not SequenceStatus.WAITING or s.block_table for s in self.waiting
        ):
            raise RuntimeError("a sequence is in the wrong queue")
        if self.running != sorted(self.running, key=lambda s: s.order):
            raise RuntimeError("running sequences are out of order")
        self.blocks.check_integrity(self.running)


def _share(sequence: Sequence, limit: int, drafts: SequenceOf[int] = ()) -> ScheduledRequest:
    """The next ``limit`` tokens of a sequence, or as many as it lacks, with guesses behind."""
    start = sequence.num_computed_tokens
    tokens = sequence.token_ids[start : start + limit]
    return ScheduledRequest(
        request_id=sequence.sequence_id,
        token_ids=[*tokens, *drafts],
        num_computed_tokens=start,
        block_table=sequence.block_table,
        params=sequence.params,
        seed=sequence.seed,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
        samples=start + len(tokens) == sequence.num_tokens and sequence.max_tokens > 0,
        num_prompt_logprobs=len(sequence.prompt_logprobs) if sequence.judges_prompt else None,
        num_pooled=sequence.num_pooled if sequence.pools_prompt else None,
        num_draft_tokens=len(drafts),
        bans=sequence.bans,
        num_roll_backs=sequence.num_roll_backs,
        max_tokens=sequence.max_tokens,
    )


def _add_pooled(sequence: Sequence, share: ScheduledRequest, outcome: ModelRunnerOutput) -> None:
    """Adds a step's share of what is pooled."""
    more = outcome.pooled.get(share.request_id)
    if more is None:
        return
    known = sequence.pooled or [0.0] * len(more)
    sequence.pooled = [a + b for a, b in zip(known, more, strict=True)]
    sequence.num_pooled = share.pooling.stop
