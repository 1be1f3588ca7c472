"""One request as the engine tracks it: a family of sequences over one prompt. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from ingle.engine.sequence import Sequence
from ingle.request import (
    CompletionOutput,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenLogprob,
)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestGroup:
    """A request with its ``n`` sequences.

    Attributes:
        request_id: The client's id.
        prompt_token_ids: The whole prompt.
        params: As the client gave them.
        prompt: The prompt's text, when it was given as text.
        arrival_time: When it came, in seconds of the monotonic clock.
        sequences: One per completion.
        num_unfinished: Sequences whose end has not been reported.
        prompt_judged: Whether the prompt's log-probabilities have been reported.
        pooled_reported: Whether the prompt's pooled hidden states have been reported.
        first_token_time: When its first token came, or None.
        last_token_times: When each sequence's latest token came, by index.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None
    arrival_time: float
    sequences: tuple[Sequence, ...] = ()
    num_unfinished: int = 0
    prompt_judged: bool = False
    pooled_reported: bool = False
    first_token_time: float | None = None
    last_token_times: dict[int, float] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated over all completions."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    def output(self, completions: list[CompletionOutput]) -> RequestOutput:
        """The request's news; counts the completions that have ended."""
        self.num_unfinished -= sum(c.finish_reason is not None for c in completions)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=self.num_unfinished == 0,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(),
            embedding=self._embedding(),
            times=self._times() if self.num_unfinished == 0 else None,
        )

    def _times(self) -> RequestTimes | None:
        """Where the time went, once it has tokens."""
        first, begun = self.first_token_time, self.sequences[0].admitted_time
        if first is None or begun is None:
            return None
        return RequestTimes(
            queue_seconds=begun - self.arrival_time,
            prefill_seconds=first - begun,
            decode_seconds=max(self.last_token_times.values(), default=first) - first,
            num_draft_tokens=sum(sequence.num_draft_tokens for sequence in self.sequences),
            num_accepted_tokens=sum(sequence.num_accepted_tokens for sequence in self.sequences),
        )

    def _embedding(self) -> list[float] | None:
        """The prompt's pooled hidden states, once, as soon as all are there."""
        first = self.sequences[0]
        if self.pooled_reported or not (first.pools_prompt and first.prompt_computed):
            return None
        self.pooled_reported = True
        count = first.num_pooled if first.params.pooling == "mean" else 1
        return [value / count for value in first.pooled]

    def _prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """The prompt's log-probabilities, once, as soon as all are known."""
        first = self.sequences[0]
        known = first.judges_prompt and first.prompt_computed
        if self.prompt_judged or not known:
            return None
        self.prompt_judged = True
        return [None, *first.prompt_logprobs]
