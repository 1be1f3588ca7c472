"""Prometheus metrics: the engine's counts under vLLM's names with the prefix ``ingle_``, and
``process_*`` figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ingle_server.engine_client import EngineStats, HistogramData
from ingle_server.model_manager import ModelManager


class Metrics:
    """One server's metrics; nothing global."""

    def __init__(self, models: ModelManager) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(EngineCollector(models))

    def render(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Reads the engine's state at the moment Prometheus asks."""

    def __init__(self, models: ModelManager) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance, so that registering does not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        loaded = self._models.current
        yield GaugeMetricFamily(
            "ingle_model_loaded", "1 while a model is in memory.", value=int(loaded is not None)
        )
        yield GaugeMetricFamily(
            "ingle_num_requests_waiting_for_model",
            "Requests waiting for a model to be loaded.",
            value=self._models.num_waiting,
        )
        if loaded is None:
            return
        stats = loaded.engine.stats()
        yield from _gauges(stats)
        yield from _counters(stats)
        yield from _histograms(stats)
        info = {
            "max_model_len": str(loaded.engine.info.max_model_len),
            "num_blocks": str(stats.kv_cache_blocks),
        }
        yield InfoMetricFamily("ingle_cache_config", "The KV cache.", value=info)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("num_requests_running", "Sequences being computed.", stats.num_requests_running),
        ("num_requests_waiting", "Sequences waiting.", stats.num_requests_waiting),
        ("kv_cache_usage_perc", "Share of the KV cache in use, 0-1.", stats.kv_cache_usage_perc),
        ("kv_cache_blocks", "Blocks of the KV cache.", stats.kv_cache_blocks),
        ("kv_cache_used_blocks", "Blocks that live requests hold.", stats.kv_cache_used_blocks),
    ):
        yield GaugeMetricFamily(f"ingle_{name}", text, value=value)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens_total),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
        ("num_preemptions", "Preemptions.", stats.num_preemptions_total),
        ("prefix_cache_queries", "Tokens looked up.", stats.prefix_cache_queries_total),
        ("prefix_cache_hits", "Tokens found.", stats.prefix_cache_hits_total),
        ("spec_decode_num_drafts", "Guesses computed.", stats.num_drafts_total),
        ("spec_decode_num_draft_tokens", "Tokens guessed.", stats.num_draft_tokens_total),
        (
            "spec_decode_num_accepted_tokens",
            "Tokens guessed right.",
            stats.num_accepted_tokens_total,
        ),
        ("rows_in_vain", "Tokens begun ahead for nobody.", stats.num_rows_in_vain_total),
    ):
        yield CounterMetricFamily(f"ingle_{name}", text, value=value)
    steps = CounterMetricFamily(
        "ingle_decode_steps", "Steps, by how the next one was begun.", labels=["next"]
    )
    for reason, count in stats.decode_steps_total.items():
        steps.add_metric([reason], count)
    yield steps
    ended = CounterMetricFamily(
        "ingle_request_success", "Sequences ended, by reason.", labels=["finished_reason"]
    )
    for reason, count in stats.requests_finished_total.items():
        ended.add_metric([reason], count)
    yield ended


def _histograms(stats: EngineStats) -> Iterator[Metric]:
    for name, text, data in (
        (
            "time_to_first_token_seconds",
            "Arrival to first token.",
            stats.time_to_first_token_seconds,
        ),
        ("inter_token_latency_seconds", "Between two tokens.", stats.inter_token_seconds),
        (
            "request_time_per_output_token_seconds",
            "Mean time between a request's tokens.",
            stats.per_output_token_seconds,
        ),
        ("e2e_request_latency_seconds", "Arrival to last token.", stats.request_seconds),
        ("request_queue_time_seconds", "Arrival to first step.", stats.queue_seconds),
        ("request_prefill_time_seconds", "First step to first token.", stats.prefill_seconds),
        ("request_decode_time_seconds", "First token to last token.", stats.decode_seconds),
        ("request_prompt_tokens", "Tokens of a request's prompt.", stats.prompt_lengths),
        ("request_generation_tokens", "Tokens a request generated.", stats.generation_lengths),
    ):
        yield HistogramMetricFamily(
            f"ingle_{name}", text, buckets=_buckets(data), sum_value=data.total
        )


def _buckets(data: HistogramData) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as Prometheus wants them: accumulated."""
    bounds = [*(str(float(bound)) for bound in data.bounds), "+Inf"]
    return list(zip(bounds, accumulate(data.counts), strict=True))
