"""The engine without threads: requests in, steps, outputs out. No torch here."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ingle.checkpoint.tokenizer import Tokenizer
from ingle.engine.admission import Admission
from ingle.engine.info import EngineInfo
from ingle.engine.metrics import EngineMetrics, EngineStats
from ingle.engine.output_processor import OutputProcessor
from ingle.engine.request_group import RequestGroup
from ingle.engine.roll_back import roll_back
from ingle.engine.scheduler import Progress, Scheduler
from ingle.engine.sequence import Sequence
from ingle.engine.sequence_text import TextNews
from ingle.engine.step import ModelRunnerOutput, Runner, SchedulerOutput
from ingle.errors import CapacityError, EngineDeadError, IngleError, RequestError
from ingle.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ingle.engine.background_compiler import BackgroundCompiler
    from ingle.engine.run_ahead import RunAhead
    from ingle.sampling.grammar import GrammarCompiler

logger = logging.getLogger("ingle.engine")

GAVE_UP = "banned_strings"
"""Why an answer ended that could not go on without a banned string."""
OUT_OF_MEMORY = (
    "The step ran out of memory, and this request was the newest in it. Try again later."
)


class EngineCore:
    """Takes requests, runs steps and hands back what is new. For one thread.

    Args:
        scheduler: Decides what each step computes.
        runner: Computes it.
        tokenizer: Turns tokens into text; None leaves text empty.
        info: What the engine says about itself.
        max_queue_len: Waiting sequences at most; None sets no limit.
        seed: Seeds the draw of seeds for requests that bring none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        max_queue_len: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        # Makes steps faster once the engine runs; set by who builds the engine.
        self.compiler: BackgroundCompiler | None = None
        # The small model that guesses for this one, if one does; set by who builds the engine.
        self.draft: EngineCore | None = None
        # What begins decode steps ahead, if anything does: the runner then; set likewise.
        self.ahead: RunAhead | None = None
        # Compiles what answers must look like; set by who builds the engine.
        self.grammars: GrammarCompiler | None = None
        self.tokenizer = tokenizer
        self.info = replace(info, max_model_len=min(info.max_model_len, scheduler.max_model_len))
        self.admission = Admission(self.info.max_model_len, info.vocab_size)
        self.metrics = EngineMetrics()
        self._outputs = OutputProcessor(tokenizer)
        self._max_queue_len = max_queue_len
        self._seeds = random.Random(seed)
        self._groups: dict[str, RequestGroup] = {}
        self._num_sequences = 0
        self._dead: EngineDeadError | None = None

    @property
    def compilers(self) -> tuple[BackgroundCompiler, ...]:
        """Its own, and the small model's: those that there are."""
        both = (self.compiler, None if self.draft is None else self.draft.compiler)
        return tuple(compiler for compiler in both if compiler is not None)

    # -- requests ------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._groups)

    def has_room(self) -> bool:
        """Whether the queue takes another request."""
        limit = self._max_queue_len
        return limit is None or len(self.scheduler.waiting) < limit

    def check_room(self, num_coming: int = 0) -> None:
        """Refuses what the queue has no room for, behind ``num_coming`` others that are on their
        way to it. May be called from any thread.

        Raises:
            CapacityError: Too many are waiting.
        """
        limit, waiting = self._max_queue_len, len(self.scheduler.waiting) + num_coming
        if limit is not None and waiting >= limit:
            raise CapacityError(
                f"{waiting} requests are waiting, and --max-queue-len is {limit}. Try again later."
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """Queues a request.

        Raises:
            RequestError: The request cannot be computed, or its id is in use.
            CapacityError: Too many are waiting.
            EngineDeadError: A step has failed before.
        """
        self._check_alive()
        self.admission.check(prompt_token_ids, params)
        self.compile_grammar(params)
        if params.banned_strings and self.tokenizer is None:
            raise RequestError("This engine has no tokenizer to see texts.", param="banned_strings")
        if request_id in self._groups:
            raise RequestError(
                f"request id {request_id[:80]!r} is in use by a request that is not finished.",
                param="request_id",
            )
        self.check_room()
        group = RequestGroup(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            prompt=prompt,
            arrival_time=time.monotonic(),
        )
        group.sequences = self._family(group)
        group.num_unfinished = len(group.sequences)
        self._enqueue(group)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the request's grammar, if it has one. May be called from any thread.

        Raises:
            RequestError: When it can't be followed.
        """
        if params.structured is None:
            return
        if self.grammars is None:
            raise RequestError("This engine can follow no grammar.", param="structured_outputs")
        if not self.grammars.is_compiled(params.structured):
            self.grammars.matcher(params.structured)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request with all its completions and frees their blocks.

        Returns:
            Its last output, with finish reason ``"abort"``; None when there is nothing to end.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        live = [sequence for sequence in group.sequences if not sequence.finished]
        if not live:
            return None  # the next step reports its end
        for sequence in live:
            self.scheduler.finish(sequence, "abort")
        return self._report(group, [Progress(sequence) for sequence in live])

    def _family(self, group: RequestGroup) -> tuple[Sequence, ...]:
        seed = group.params.seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        max_tokens = self.admission.max_tokens(len(group.prompt_token_ids), group.params)
        family: list[Sequence] = []
        for index in range(group.params.n):
            self._num_sequences += 1
            sequence = Sequence(
                sequence_id=f"{group.request_id}/{index}#{self._num_sequences}",
                request_id=group.request_id,
                index=index,
                prompt_token_ids=group.prompt_token_ids,
                params=group.params,
                seed=seed + index,
                max_tokens=max_tokens,
                order=self._num_sequences,
                leader=family[0] if family else None,
            )
            family.append(sequence)
        return tuple(family)

    def _enqueue(self, group: RequestGroup) -> None:
        for sequence in group.sequences:
            self._outputs.open(sequence)
        self._groups[group.request_id] = group
        for sequence in group.sequences:
            self.scheduler.add(sequence)

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns what is new, one output per request with news.

        Raises:
            EngineDeadError: The step failed as a whole. All requests are ended and dropped, and
                every later call raises this too.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception as error:
            logger.exception("The engine has stopped: a step failed")
            self._die(error)
            raise self._dead_error() from error

    def _step(self) -> list[RequestOutput]:
        plan = self.scheduler.schedule()
        progress = self._execute(plan)
        if not (plan.scheduled or progress) and self._groups:
            raise RuntimeError(f"{len(self._groups)} requests are left and none can go on")
        by_group: dict[str, list[Progress]] = {}
        for news in progress:
            by_group.setdefault(news.sequence.request_id, []).append(news)
        outputs = [self._report(self._groups[name], news) for name, news in by_group.items()]
        if not self._groups and logger.isEnabledFor(logging.DEBUG):
            self.scheduler.check_integrity()
        return outputs

    def _execute(self, plan: SchedulerOutput) -> list[Progress]:
        if not plan.scheduled:
            return self.scheduler.update(plan, ModelRunnerOutput())
        try:
            outcome = self.runner.execute(plan)
        except (MemoryError, CapacityError):
            logger.warning("A step of %d tokens ran out of memory", plan.num_tokens)
            return self.scheduler.fail_newest(plan, OUT_OF_MEMORY)
        return self.scheduler.update(plan, outcome)

    def _report(self, group: RequestGroup, news: list[Progress]) -> RequestOutput:
        """The group's output for this step; a group whose last sequence ended is dropped."""
        output = group.output([self._completion(group, progress) for progress in news])
        if output.finished:
            del self._groups[group.request_id]
            self._finish_group(group, output)
        return output

    def _completion(self, group: RequestGroup, progress: Progress) -> CompletionOutput:
        """One sequence's news, and its end or its way back when a string in it says so."""
        sequence = progress.sequence
        completion, news = self._text(progress)
        if news.stop_string is not None:
            self.scheduler.finish(sequence, "stop", stop_reason=news.stop_string)
        elif news.gave_up:
            self.scheduler.finish(sequence, "length", stop_reason=GAVE_UP)
        if news.roll_back is not None:
            back = news.roll_back
            roll_back(self.scheduler, sequence, back.num_output, back.token_id)
        else:
            sequence.take_back(news.num_dropped)
        for _ in completion.token_ids:
            self._count_token(group, sequence)
        if sequence.finished:
            completion.finish_reason = sequence.finish_reason
            completion.stop_reason = sequence.stop_reason
            completion.error = sequence.error
            self._outputs.close(sequence)
            self.metrics.finished[str(sequence.finish_reason)] += 1
        return completion

    def _text(self, progress: Progress) -> tuple[CompletionOutput, TextNews]:
        """One sequence's new text. A row whose text cannot be made ends alone."""
        try:
            return self._outputs.process(progress)
        except Exception as error:
            sequence = progress.sequence
            logger.exception("Request %r: its text could not be made", sequence.request_id)
            self.scheduler.finish(sequence, "error", error=f"Detokenizing failed: {error}")
            return CompletionOutput(index=sequence.index), TextNews()

    # -- numbers -------------------------------------------------------------------------------

    def _count_token(self, group: RequestGroup, sequence: Sequence) -> None:
        now, metrics = time.monotonic(), self.metrics
        metrics.generation_tokens += 1
        if group.first_token_time is None:
            group.first_token_time = now
            metrics.prompt_tokens += len(group.prompt_token_ids)
            metrics.first_token.observe(now - group.arrival_time)
        last = group.last_token_times.get(sequence.index)
        if last is not None:
            metrics.inter_token.observe(now - last)
        group.last_token_times[sequence.index] = now

    def _finish_group(self, group: RequestGroup, output: RequestOutput) -> None:
        seconds = time.monotonic() - group.arrival_time
        self.metrics.request.observe(seconds)
        num_tokens = tuple(len(sequence.output_token_ids) for sequence in group.sequences)
        self.metrics.finish_request(output.times, len(group.prompt_token_ids), num_tokens)
        reasons = [str(sequence.finish_reason) for sequence in group.sequences]
        first = group.first_token_time
        logger.info(
            "Request %r: %d prompt tokens (%d cached), %d generated, %s; first token %s, %.3f s",
            group.request_id,
            len(group.prompt_token_ids),
            output.num_cached_tokens,
            group.num_output_tokens,
            ", ".join(dict.fromkeys(reasons)),
            "never" if first is None else f"after {first - group.arrival_time:.3f} s",
            seconds,
        )

    def stats(self) -> EngineStats:
        """The engine's state now. May be called from any thread."""
        scheduler, metrics = self.scheduler, self.metrics
        blocks, speculation = scheduler.blocks, scheduler.speculation
        used = blocks.num_usable_blocks - blocks.num_free_blocks
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            kv_cache_usage_perc=used / blocks.num_usable_blocks,
            kv_cache_blocks=blocks.num_usable_blocks,
            kv_cache_used_blocks=used,
            prompt_tokens_total=metrics.prompt_tokens,
            generation_tokens_total=metrics.generation_tokens,
            num_preemptions_total=scheduler.num_preemptions,
            prefix_cache_queries_total=scheduler.prefix_cache_queries,
            prefix_cache_hits_total=scheduler.prefix_cache_hits,
            num_drafts_total=speculation.num_drafts if speculation else 0,
            num_draft_tokens_total=speculation.num_draft_tokens if speculation else 0,
            num_accepted_tokens_total=speculation.num_accepted_tokens if speculation else 0,
            decode_steps_total=dict(self.ahead.next_steps) if self.ahead else {},
            num_rows_in_vain_total=self.ahead.num_rows_in_vain if self.ahead else 0,
            requests_finished_total=dict(metrics.finished),
            time_to_first_token_seconds=metrics.first_token.snapshot(),
            inter_token_seconds=metrics.inter_token.snapshot(),
            request_seconds=metrics.request.snapshot(),
            queue_seconds=metrics.queue.snapshot(),
            prefill_seconds=metrics.prefill.snapshot(),
            decode_seconds=metrics.decode.snapshot(),
            per_output_token_seconds=metrics.per_output_token.snapshot(),
            prompt_lengths=metrics.prompt_length.snapshot(),
            generation_lengths=metrics.generation_length.snapshot(),
        )

    # -- death ---------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead_error()

    def _dead_error(self) -> EngineDeadError:
        return EngineDeadError(*(self._dead.args if self._dead else ()))

    def _die(self, error: Exception) -> None:
        """Ends everything and frees its blocks: a later inspection finds nothing held."""
        shown = str(error) if isinstance(error, IngleError) else type(error).__name__
        self._dead = EngineDeadError(f"The engine has stopped: a step failed with {shown}.")
        self._groups.clear()
        self._outputs.clear()
        self.scheduler.finish_all(str(self._dead))
