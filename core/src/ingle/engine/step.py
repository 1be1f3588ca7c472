"""The seam between scheduler and runner: plain Python, no torch, no queues."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ingle.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step.

    Attributes:
        request_id: Engine-internal id, unique among live requests.
        token_ids: The tokens to compute now, at positions ``num_computed_tokens`` onward.
        num_computed_tokens: Tokens whose keys and values are already in the cache.
        block_table: Block numbers that hold this request's tokens, enough for this step.
        params: How to sample.
        seed: The request's seed, drawn at admission when the client gave none.
        prompt_token_ids: The whole prompt. Read only.
        output_token_ids: Everything generated so far. Read only.
        samples: Whether the step reaches the request's last token, so that a next one is drawn.
        num_prompt_logprobs: How many of the prompt's log-probabilities are known: of positions 1
            to this. The step adds those of the positions after it that it reaches. None: nobody
            wants any.
        num_pooled: How many of the prompt's tokens have been pooled; None: nobody wants it.
        num_draft_tokens: How many tokens at the end of ``token_ids`` are guesses: the step draws a
            token before each and one after the last, as far as the draws equal the guesses.
        bans: By number of output tokens before them: tokens that may not be drawn there.
        num_roll_backs: How often the request was sent back to earlier tokens.
        max_tokens: Output tokens at most, the end of the context included; None: not said.
    """

    request_id: str
    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    samples: bool
    num_prompt_logprobs: int | None = None
    num_pooled: int | None = None
    num_draft_tokens: int = 0
    bans: Mapping[int, Collection[int]] = field(default_factory=dict)
    num_roll_backs: int = 0
    max_tokens: int | None = None

    @property
    def draft_token_ids(self) -> Sequence[int]:
        """The guesses."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]

    @property
    def seq_len(self) -> int:
        """Tokens in the cache once this step has run."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def judging(self) -> range:
        """Positions whose logits judge a prompt token whose log-probability is wanted: each the
        one after it."""
        if self.num_prompt_logprobs is None:
            return range(0)
        first = max(self.num_computed_tokens, self.num_prompt_logprobs)
        return range(first, min(self.seq_len, len(self.prompt_token_ids) - 1))

    @property
    def pooling(self) -> range:
        """Positions whose hidden states this step adds to what is pooled."""
        if self.num_pooled is None:
            return range(0)
        stop = min(self.seq_len, len(self.prompt_token_ids))
        first = max(self.num_computed_tokens, self.num_pooled)
        if self.params.pooling == "last":
            first = max(first, len(self.prompt_token_ids) - 1)
        return range(first, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's plan.

    Attributes:
        scheduled: In the order their tokens stand in the batch.
        block_copies: (source block, target block) pairs to copy before anything is written, for
            prefix matches that end inside a block.
        preempted_request_ids: Requests that lost their blocks in this step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    preempted_request_ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(len(s.token_ids) for s in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The token drawn for one request."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """What a step produced.

    Attributes:
        sampled: By request id, for every request with ``samples``, unless it failed.
        followers: By request id: the tokens drawn after that one in the same step, where it and
            they equal what was guessed; all but the last of them are in the cache.
        errors: By request id: why this request alone must end (NaN logits, say).
        prompt_logprobs: By request id, for every request with ``judging`` positions: one each.
        pooled: By request id, for every request with ``pooling`` positions: the sum over them.
    """

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    followers: dict[str, list[SampledToken]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    pooled: dict[str, list[float]] = field(default_factory=dict)


class Runner(Protocol):
    """Runs a step's plan. ``engine/model_runner.py`` is the real one; tests use fakes."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the step. Raises only when the whole step failed."""
        ...
