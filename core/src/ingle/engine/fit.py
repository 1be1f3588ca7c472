"""Whether a model fits a device, with every term, before a byte of it is loaded. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ingle.checkpoint.model_config import ModelConfig
from ingle.config import EngineConfig
from ingle.engine.memory_plan import (
    MemoryPlan,
    cache_limit,
    length_limit,
    place_embeddings,
    plan_memory,
)
from ingle.engine.speed import Bandwidths, tokens_per_second
from ingle.engine.weight_sizes import WeightSizes

UNSTATED_CONTEXT = 8192
"""Context a plan is reported for when none was asked for and none fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device a model should fit.

    Attributes:
        name: For people.
        device_type: ``cpu`` or ``cuda``.
        total_bytes: Memory it has.
        reserve_bytes: Of these, what the plan does not touch.
        bandwidths: Of its memory and its link to the host; None when not known.
    """

    name: str
    device_type: str
    total_bytes: int
    reserve_bytes: int
    bandwidths: Bandwidths = field(default_factory=Bandwidths)

    @property
    def usable_bytes(self) -> int:
        """Total minus reserve."""
        return self.total_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What should fit where.

    Attributes:
        config: The options.
        model: The model.
        format_name: The weight format.
        weights: Sizes of the weights.
        block_bytes: One cache block over all layers, by cache format; every format offered.
        cache_format: The one chosen.
        itemsize: Bytes of one activation.
        target: The device.
        num_sequences: Sequences that must fit at full length together.
    """

    config: EngineConfig
    model: ModelConfig
    format_name: str
    weights: WeightSizes
    block_bytes: Mapping[str, int]
    cache_format: str
    itemsize: int
    target: Target
    num_sequences: int = 1

    def plan(self) -> MemoryPlan:
        """Everything but the cache, embeddings placed."""
        plan = plan_memory(
            self.config,
            self.model,
            self.weights,
            self.block_bytes[self.cache_format],
            self.itemsize,
            self.target.device_type,
        )
        if self.target.device_type != "cuda":
            return plan
        usable = self.target.usable_bytes
        return place_embeddings(self.config, plan, self.model, usable, self.num_sequences)

    def with_context(self, tokens: int) -> Question:
        """The same for another context."""
        return replace(self, config=replace(self.config, max_model_len=tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        question: What was asked.
        plan: The terms.
        max_model_len: The context it is about: what was asked for, or the longest that fits.
        cache_limit: Bytes the cache may take; negative when the rest alone is too much.
    """

    question: Question
    plan: MemoryPlan
    max_model_len: int
    cache_limit: int

    @property
    def kv_cache_bytes(self) -> int:
        """Cache that is needed at least."""
        return self.plan.cache_bytes(self.max_model_len, self.question.num_sequences)

    @property
    def total_bytes(self) -> int:
        """Everything on the device."""
        return self.plan.fixed_bytes + self.kv_cache_bytes

    @property
    def budget_bytes(self) -> int:
        """What everything may take."""
        return self.plan.fixed_bytes + self.cache_limit

    @property
    def margin_bytes(self) -> int:
        """What is left over; negative: what is missing."""
        return self.cache_limit - self.kv_cache_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.margin_bytes >= 0

    @property
    def tokens_per_second(self) -> float | None:
        """Expected decode speed of one sequence at full context; None when not known."""
        return tokens_per_second(
            self.plan, self.max_model_len, self.question.model.num_layers, self.target.bandwidths
        )

    @property
    def target(self) -> Target:
        """The device."""
        return self.question.target

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every term in bytes."""
        plan, question, target = self.plan, self.question, self.question.target
        return {
            "fits": self.fits,
            "model": question.config.model,
            "quantization": question.format_name,
            "bits_per_weight": round(plan.weights.bits_per_weight, 3),
            "device": target.name,
            "kv_cache_dtype": question.cache_format,
            "max_model_len": self.max_model_len,
            "num_sequences": question.num_sequences,
            "weights_bytes": plan.weights.total_bytes,
            "weights_on_device_bytes": plan.weights_bytes,
            "embeddings_bytes": plan.weights.embeddings_bytes,
            "embeddings_on": "host" if plan.embeddings_on_host else "device",
            "offload_layers": plan.offloaded_layers,
            "offloaded_bytes": plan.offloaded_bytes,
            "kv_cache_bytes_per_token": plan.bytes_per_token,
            "kv_cache_bytes": self.kv_cache_bytes,
            "activation_bytes": plan.activation_bytes,
            "workspace_bytes": plan.workspace_bytes,
            "graphs_bytes": plan.graphs_bytes,
            "context_bytes": plan.context_bytes,
            "compiled_bytes": plan.compiled_bytes,
            "total_bytes": self.total_bytes,
            "memory_bytes": target.total_bytes,
            "reserve_bytes": target.reserve_bytes,
            "budget_bytes": self.budget_bytes,
            "margin_bytes": self.margin_bytes,
            "tokens_per_second": self.tokens_per_second,
        }


def judge(question: Question) -> Verdict:
    """The verdict. A context of ``auto`` becomes the longest that fits.

    Raises:
        ConfigError: When the context asked for is more than the model has positions.
    """
    plan = question.plan()
    target = question.target
    limit = cache_limit(question.config, plan, target.usable_bytes, target.device_type)
    context = length_limit(question.config, question.model)
    if question.config.max_model_len == "auto":
        longest = plan.longest(max(0, limit), question.num_sequences)
        context = min(context, longest or UNSTATED_CONTEXT)
    return Verdict(question=question, plan=plan, max_model_len=context, cache_limit=limit)
