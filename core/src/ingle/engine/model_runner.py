"""Runs a step's plan: plan to tensors, forward, sample.

T tokens of the step, S sequences.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import (
    ForwardBatch,
    SequenceSpan,
    consecutive_start,
    int_tensor,
)
from ingle.engine.step import ModelRunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from ingle.model.decoder import Model
from ingle.request import TokenLogprob
from ingle.sampling.sampler import (
    CPU_OUT_OF_MEMORY,
    DrawnToken,
    Sampler,
    SamplingRow,
    prompt_logprobs,
)
from ingle.sampling.stages import History

JUDGED_ROWS = 16
"""Prompt positions whose logits exist at once: a whole chunk's would not fit beside the model."""


class ModelRunner:
    """Owns the model and its cache, and knows nothing of requests beyond the plan it is handed.

    Args:
        model: The decoder; may be replaced between steps by one that computes the same.
        caches: One per layer.
        sampler: Draws the tokens.
        block_size: Tokens per block.
        device: Where the model lives.

    Attributes:
        between_steps: Held while a step runs, and by whoever changes the model's weights.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        sampler: Sampler,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.caches = tuple(caches)
        self.sampler = sampler
        self.block_size = block_size
        self.device = device
        self.between_steps = threading.Lock()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step and draws a token for every request that reached its end.

        Raises:
            MemoryError: When there was not enough memory for it.
        """
        try:
            with self.between_steps, torch.inference_mode():
                return self._execute(plan)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error):
                raise MemoryError(str(error)) from error
            raise

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for source, target in plan.block_copies:
            self._copy_block(source, target)
        if not plan.scheduled:
            return ModelRunnerOutput()
        hidden = self.model.hidden_states(self._batch(plan.scheduled), self.caches)
        sampling, last_rows = _sampling_rows(plan.scheduled)
        output = ModelRunnerOutput()
        if sampling:
            logits = self.model.logits(_select(hidden, last_rows))
            rows = [row for item in sampling for row in _rows(item)]
            output = _output(sampling, self.sampler(logits, rows))
        self._judge_prompts(plan.scheduled, hidden, output)
        self._pool_prompts(plan.scheduled, hidden, output)
        return output

    def _pool_prompts(
        self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        """Adds sums of the hidden states that requests want pooled."""
        start = 0
        for item in scheduled:
            if item.pooling:
                first = start + item.pooling.start - item.num_computed_tokens
                rows = self.model.normed(hidden[first : first + len(item.pooling)])
                total = rows.double().sum(0)
                if bool(torch.isfinite(total).all()):
                    output.pooled[item.request_id] = total.tolist()
                else:
                    output.errors[item.request_id] = "the model's hidden states are not finite"
            start += len(item.token_ids)

    def _judge_prompts(
        self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        """Adds the log-probabilities of prompt tokens that requests want."""
        start = 0
        for item in scheduled:
            if item.judging:
                first = start + item.judging.start - item.num_computed_tokens
                self._judge(item, hidden[first : first + len(item.judging)], output)
            start += len(item.token_ids)

    def _judge(
        self, item: ScheduledRequest, hidden: torch.Tensor, output: ModelRunnerOutput
    ) -> None:
        tokens = item.prompt_token_ids[item.judging.start + 1 : item.judging.stop + 1]
        judged: list[TokenLogprob] = []
        for at in range(0, len(tokens), JUDGED_ROWS):
            logits = self.model.logits(hidden[at : at + JUDGED_ROWS])
            if not bool(torch.isfinite(logits.amax(-1)).all()):
                output.errors[item.request_id] = "the model's logits for the prompt are not finite"
                return
            num_top = item.params.prompt_logprobs or 0
            judged += prompt_logprobs(logits, tokens[at : at + JUDGED_ROWS], num_top)
        output.prompt_logprobs[item.request_id] = judged

    def _batch(self, scheduled: Sequence[ScheduledRequest]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for item in scheduled:
            start = len(token_ids)
            token_ids.extend(item.token_ids)
            places = range(item.num_computed_tokens, item.seq_len)
            positions.extend(places)
            slots.extend(self._slots(item.block_table, places))
            spans.append(self._span(item, start))
        return ForwardBatch(
            token_ids=int_tensor(token_ids, self.device),
            positions=int_tensor(positions, self.device),
            slot_mapping=int_tensor(slots, self.device),
            spans=tuple(spans),
        )

    def _slots(self, block_table: Sequence[int], places: range) -> list[int]:
        size = self.block_size
        return [block_table[place // size] * size + place % size for place in places]

    def _span(self, item: ScheduledRequest, start: int) -> SequenceSpan:
        num_used = -(-item.seq_len // self.block_size)
        return SequenceSpan(
            start=start,
            stop=start + len(item.token_ids),
            seq_len=item.seq_len,
            block_table=item.block_table,
            first_block=consecutive_start(item.block_table, num_used),
        )

    def _copy_block(self, source: int, target: int) -> None:
        for cache in self.caches:
            for store in (cache.k_store, cache.v_store):
                for tensor in store.tensors().values():
                    tensor[target].copy_(tensor[source])


def _sampling_rows(
    scheduled: Sequence[ScheduledRequest],
) -> tuple[list[ScheduledRequest], list[int]]:
    """Requests that draw a token, and the batch rows of each one's last token and guesses."""
    sampling: list[ScheduledRequest] = []
    rows: list[int] = []
    end = 0
    for item in scheduled:
        end += len(item.token_ids)
        if item.samples:
            sampling.append(item)
            rows.extend(range(end - 1 - item.num_draft_tokens, end))
    return sampling, rows


def _select(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == hidden.shape[0]:
        return hidden
    return hidden[torch.tensor(rows, device=hidden.device)]


def _rows(item: ScheduledRequest) -> Iterator[SamplingRow]:
    """A row behind the known tokens, and one behind each guess."""
    drafts = item.draft_token_ids
    for at in range(len(drafts) + 1):
        output = [*item.output_token_ids, *drafts[:at]] if at else item.output_token_ids
        yield SamplingRow(
            params=item.params,
            seed=item.seed,
            history=History(prompt_token_ids=item.prompt_token_ids, output_token_ids=output),
            sequence_id=item.request_id,
            after=drafts[at - 1] if at else None,
            barred=tuple(item.bans.get(len(output), ())) if item.bans else (),
            num_roll_backs=item.num_roll_backs,
        )


def _output(sampling: Sequence[ScheduledRequest], drawn: Sequence[DrawnToken]) -> ModelRunnerOutput:
    output, at = ModelRunnerOutput(), 0
    for item in sampling:
        first, *more = drawn[at : at + 1 + item.num_draft_tokens]
        at += 1 + item.num_draft_tokens
        if first.error is not None:
            output.errors[item.request_id] = first.error
            continue
        output.sampled[item.request_id] = _sampled(first)
        # A row that failed behind a guess is drawn again in the next step, and fails there.
        right = [_sampled(token) for token in more if token.token_id >= 0]
        if right:
            output.followers[item.request_id] = right
    return output


def _sampled(token: DrawnToken) -> SampledToken:
    return SampledToken(token_id=token.token_id, logprob=token.logprob)
