"""Counters and histograms of one engine, and a snapshot of them. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingle.request import RequestTimes

FIRST_TOKEN_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Upper bounds of the buckets for time to first token, in seconds."""
INTER_TOKEN_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets for time between tokens, in seconds."""
REQUEST_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets for a request's whole time, in seconds."""

LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Upper bounds of the buckets for lengths, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramData:
    """Observations counted by size.

    Attributes:
        bounds: Upper bounds, inclusive, ascending.
        counts: Observations per bucket, not accumulated; one more than ``bounds``: the last has
            no upper bound.
        total: Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)


class Histogram:
    """Counts observations by size."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramData:
        """Everything observed so far."""
        return HistogramData(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's state at one moment; totals count from its start.

    Attributes:
        num_requests_running: Sequences being computed.
        num_requests_waiting: Sequences waiting for their turn.
        kv_cache_usage_perc: Share of the cache's blocks that live requests hold, 0 to 1.
        kv_cache_blocks: Blocks there are to give out.
        kv_cache_used_blocks: Of these, the ones that live requests hold.
        prompt_tokens_total: Prompt tokens of requests that got their first token.
        generation_tokens_total: Tokens generated.
        num_preemptions_total: Times a sequence lost its blocks to an older one.
        prefix_cache_queries_total: Tokens looked up in the prefix cache.
        prefix_cache_hits_total: Of these, the ones found.
        num_drafts_total: Guesses of next tokens that were computed.
        num_draft_tokens_total: Tokens in them.
        num_accepted_tokens_total: Of these, the ones that were right.
        decode_steps_total: Where steps can be begun ahead (``run_ahead``): steps, by whether the
            next one was begun before their tokens were read, or why not.
        num_rows_in_vain_total: Tokens that were begun ahead and nobody wanted: one at most for
            each sequence that ended.
        requests_finished_total: Sequences ended, by finish reason.
        time_to_first_token_seconds: One observation per request.
        inter_token_seconds: One observation per generated token but the first.
        request_seconds: One observation per finished request, from arrival to end.
        queue_seconds: From arrival to the first step, per finished request with tokens.
        prefill_seconds: From there to the first token, likewise.
        decode_seconds: From the first token to the last, likewise.
        per_output_token_seconds: The mean time between tokens of a request with two or more.
        prompt_lengths: Tokens of the prompt, per finished request.
        generation_lengths: Tokens generated over all its completions, likewise.
    """

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    kv_cache_blocks: int
    kv_cache_used_blocks: int
    prompt_tokens_total: int
    generation_tokens_total: int
    num_preemptions_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    num_drafts_total: int
    num_draft_tokens_total: int
    num_accepted_tokens_total: int
    decode_steps_total: Mapping[str, int]
    num_rows_in_vain_total: int
    requests_finished_total: Mapping[str, int]
    time_to_first_token_seconds: HistogramData
    inter_token_seconds: HistogramData
    request_seconds: HistogramData
    queue_seconds: HistogramData
    prefill_seconds: HistogramData
    decode_seconds: HistogramData
    per_output_token_seconds: HistogramData
    prompt_lengths: HistogramData
    generation_lengths: HistogramData


@dataclass(slots=True)
class EngineMetrics:
    """What an engine counts while it runs; the scheduler keeps its own counters.

    Attributes:
        prompt_tokens: Prompt tokens of requests that got their first token.
        generation_tokens: Tokens generated.
        finished: Sequences ended, by finish reason.
        first_token: Seconds from arrival to first token, per request.
        inter_token: Seconds between two tokens of a sequence.
        request: Seconds from arrival to end, per request.
        queue, prefill, decode, per_output_token, prompt_length, generation_length: As in
            ``EngineStats``.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    queue: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    decode: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    generation_length: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))

    def finish_request(
        self, times: RequestTimes | None, num_prompt_tokens: int, num_tokens: tuple[int, ...]
    ) -> None:
        """Counts one finished request; ``num_tokens`` has one entry per completion."""
        self.prompt_length.observe(num_prompt_tokens)
        self.generation_length.observe(sum(num_tokens))
        if times is None:
            return
        self.queue.observe(times.queue_seconds)
        self.prefill.observe(times.prefill_seconds)
        self.decode.observe(times.decode_seconds)
        longest = max(num_tokens)
        if longest > 1:
            self.per_output_token.observe(times.decode_seconds / (longest - 1))
