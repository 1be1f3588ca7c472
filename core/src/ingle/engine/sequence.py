"""One completion of one request, as the engine tracks it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ingle.engine.speculation import Drafter
from ingle.request import FinishReason, SamplingParams, TokenLogprob


class SequenceStatus(Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One completion of one request; a request with ``n`` completions is a family of these.

    Attributes:
        sequence_id: Unique among all sequences of the engine; the step's ``request_id``.
        request_id: The client's id.
        index: 0 to n-1.
        prompt_token_ids: The whole prompt.
        params: How to sample and when to stop.
        seed: The seed its tokens are drawn with.
        max_tokens: Tokens to generate at most, the end of the context included.
        order: Rises with arrival; the smaller, the older.
        leader: The family's first sequence, when this is another one: it computes the prompt.
        token_ids: Prompt and output together.
        output_token_ids: Everything generated so far.
        num_computed_tokens: Tokens whose keys and values are in the cache.
        num_cached_tokens: Prompt tokens found in the prefix cache at first admission.
        block_table: Block numbers that hold the tokens, in order.
        block_digests: Digest of the tokens up to the end of block i; filled as far as needed.
        num_indexed_blocks: Leading full blocks already offered to the prefix index.
        prompt_computed: Whether the prompt was computed once; stays when preempted.
        prompt_logprobs: Of the prompt's tokens from position 1 on, as far as computed.
        pooled: The sum of what is pooled so far, of the first ``num_pooled`` tokens of the prompt.
        admitted: Whether it ever held blocks.
        admitted_time: When it first did, in seconds of the monotonic clock.
        drafter: Guesses its next tokens, when the engine speculates.
        bans: By number of output tokens before them: tokens that may not come there, because a
            banned string began with them.
        num_roll_backs: How often it was sent back.
        num_draft_tokens: Tokens that were guessed and computed.
        num_accepted_tokens: Of these, the ones that were right.
    """

    sequence_id: Final[str]
    request_id: Final[str]
    index: Final[int]
    prompt_token_ids: Final[list[int]]
    params: Final[SamplingParams]
    seed: Final[int]
    max_tokens: Final[int]
    order: Final[int] = 0
    leader: Sequence | None = None
    token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_indexed_blocks: int = 0
    prompt_computed: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)
    num_pooled: int = 0
    admitted: bool = False
    admitted_time: float | None = None
    drafter: Drafter | None = None
    bans: dict[int, set[int]] = field(default_factory=dict)
    num_roll_backs: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens known but not yet computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    @property
    def judges_prompt(self) -> bool:
        """Whether it is the one of its family that reports the prompt's log-probabilities."""
        return self.index == 0 and self.params.prompt_logprobs is not None

    @property
    def pools_prompt(self) -> bool:
        """Whether it is the one of its family that reports the prompt's pooled hidden states."""
        return self.index == 0 and self.params.pooling is not None

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens whose keys and values may come from the cache: not the last one's, whose logits
        are needed, and none that is judged or pooled and has not been yet."""
        last = len(self.token_ids) - 1
        if self.pools_prompt and self.params.pooling == "mean":
            last = min(last, self.num_pooled)
        if not self.judges_prompt or len(self.prompt_logprobs) >= len(self.prompt_token_ids) - 1:
            return last
        return min(last, len(self.prompt_logprobs))

    def take_back(self, count: int) -> None:
        """Removes the last ``count`` tokens of one that holds no blocks for them."""
        if count:
            del self.token_ids[-count:], self.output_token_ids[-count:]

    def roll_back(self, num_output: int, token_id: int) -> None:
        """Goes back to the first ``num_output`` output tokens; ``token_id`` may not follow them.

        What was barred further on is not any more: it would follow other tokens.
        """
        self.take_back(len(self.output_token_ids) - num_output)
        self.bans = {place: ids for place, ids in self.bans.items() if place == num_output}
        self.bans.setdefault(num_output, set()).add(token_id)
        self.num_roll_backs += 1
        self.finish_reason, self.stop_reason = None, None

    def append(self, token_id: int) -> None:
        """Adds a generated token."""
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
