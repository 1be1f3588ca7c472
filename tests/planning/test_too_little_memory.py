"""Starting with too little memory: what is refused, what shrinks, and that the advice works."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ingle.checkpoint.model_config import ModelConfig, load_model_config
from ingle.config import EngineConfig
from ingle.engine.fit import Question, Target, judge
from ingle.engine.fit_advice import advise
from ingle.engine.memory import Alternatives, CachePlan, plan_cache
from ingle.engine.memory_plan import (
    MemoryPlan,
    cache_limit,
    place_embeddings,
    plan_memory,
    usable_on_card,
)
from ingle.engine.weight_sizes import WeightSizes
from ingle.errors import CapacityError

GIB, MIB = 1024**3, 1024**2
BLOCK_BYTES = 256 * 23040
WEIGHTS = WeightSizes(
    layers_bytes=200 * MIB,
    linear_values=100 * MIB,
    linear_bytes=200 * MIB,
    head_bytes=54 * MIB,
    embeddings_bytes=54 * MIB,
)


@pytest.fixture(scope="module")
def model(demo_model_dir: Path) -> ModelConfig:
    return load_model_config(demo_model_dir)


def memory_plan(
    config: EngineConfig, model: ModelConfig, device: str = "cpu", copied: int = 0
) -> MemoryPlan:
    weights = replace(WEIGHTS, copied_bytes=copied)
    return plan_memory(config, model, weights, BLOCK_BYTES, 2, device)


OTHER_CACHES = {
    "auto": BLOCK_BYTES,
    "int8": BLOCK_BYTES * 33 // 64,
    "fp8_e5m2": BLOCK_BYTES // 2,
    "fp8_e4m3": BLOCK_BYTES // 2,
    "int4": BLOCK_BYTES * 9 // 32,
}
"""Bytes of a block, as the formats count them."""


def start(
    model: ModelConfig, usable: int | None = None, copied: int = 0, **options: object
) -> CachePlan:
    """The cache of a CPU start with ``usable`` bytes free, where compiled steps copy ``copied``."""
    config = EngineConfig(**options)  # type: ignore[arg-type]
    plan = memory_plan(config, model, copied=copied)
    budget = cache_limit(config, plan, 64 * GIB if usable is None else usable, "cpu")
    eager = replace(plan, compiled_bytes=0)
    others = Alternatives(
        caches=OTHER_CACHES,
        eager_budget=cache_limit(config, eager, 64 * GIB if usable is None else usable, "cpu"),
    )
    return plan_cache(config, model, plan, budget, "cpu", others)


def advice(model: ModelConfig, num_blocks: int) -> list[str]:
    """What a start is told with 8,192 tokens (33 blocks) asked for and ``num_blocks`` there."""
    with pytest.raises(CapacityError) as caught:
        start(model, max_model_len=8192, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES)
    return re.findall(r"(?:--[\w-]+ [\w,=]+ ?)+", str(caught.value).split("What would fit: ")[1])


def test_by_default_a_cpu_holds_four_full_sequences(model: ModelConfig) -> None:
    assert start(model).num_blocks == 1 + 4 * 8192 // 256


def test_by_default_a_cpu_cache_takes_40_percent_of_what_weights_leave(model: ModelConfig) -> None:
    plan = start(model, usable=WEIGHTS.total_bytes + 1000 * MIB)
    assert plan.num_blocks == 400 * MIB // BLOCK_BYTES


def test_a_size_asked_for_is_exact(model: ModelConfig) -> None:
    plan = start(model, kv_cache_memory_bytes="1GiB")
    assert plan.num_blocks == GIB // BLOCK_BYTES


def test_an_automatic_context_shrinks(model: ModelConfig) -> None:
    plan = start(model, kv_cache_memory_bytes=10 * BLOCK_BYTES)
    assert plan.max_model_len == 9 * 256


def test_a_context_asked_for_that_does_not_fit_is_refused_with_advice_that_works(
    model: ModelConfig,
) -> None:
    options = {"max_model_len": 4096, "kv_cache_memory_bytes": 10 * BLOCK_BYTES}
    with pytest.raises(CapacityError) as caught:
        start(model, **options)
    message = str(caught.value)
    shorter = re.search(r"--max-model-len (\d+)", message)
    larger = re.search(r"--kv-cache-memory-bytes (\w+)", message)
    assert shorter is not None
    assert larger is not None
    assert start(model, **{**options, "max_model_len": int(shorter[1])}).max_model_len == 9 * 256
    assert start(model, **{**options, "kv_cache_memory_bytes": larger[1]}).max_model_len == 4096


@pytest.mark.parametrize(
    ("num_blocks", "wanted"), [(18, "int8"), (17, "fp8_e4m3"), (10, "int4"), (8, None)]
)
def test_the_largest_smaller_cache_that_is_enough_is_named_and_no_other(
    model: ModelConfig, num_blocks: int, wanted: str | None
) -> None:
    caches = [way.split()[1] for way in advice(model, num_blocks) if "--kv-cache-dtype" in way]
    assert caches == ([] if wanted is None else [wanted])


def test_where_no_context_fits_a_smaller_cache_and_a_shorter_context_are_named_together(
    model: ModelConfig,
) -> None:
    assert "--kv-cache-dtype int4 --max-model-len 512" in [w.strip() for w in advice(model, 1)]


def test_where_only_the_compiled_matrices_are_too_much_the_way_without_them_is_named(
    model: ModelConfig,
) -> None:
    usable = memory_plan(EngineConfig(), model).fixed_bytes + 100 * MIB
    with pytest.raises(CapacityError) as caught:
        start(model, usable=usable, copied=200 * MIB)
    assert "What would fit: --enforce-eager" in str(caught.value)
    eager = start(model, usable=usable, copied=200 * MIB, enforce_eager=True)
    assert eager.max_model_len > 256
    longest = f"--enforce-eager --max-model-len {eager.max_model_len}"
    with pytest.raises(CapacityError, match=f"What would fit: {longest}"):
        start(model, usable=usable, copied=200 * MIB, max_model_len=8192)


def test_shrink_takes_the_longest_that_fits_and_says_so_loudly(
    model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ingle.engine"):
        plan = start(
            model,
            max_model_len=4096,
            kv_cache_memory_bytes=10 * BLOCK_BYTES,
            on_memory="shrink",
        )
    assert plan.max_model_len == 9 * 256
    assert "4096 tokens does not fit: SHRUNK TO 2304" in caplog.text


def test_when_not_even_the_weights_fit_nothing_shrinks_and_no_context_is_suggested(
    model: ModelConfig,
) -> None:
    with pytest.raises(CapacityError, match="weights") as caught:
        start(model, usable=100 * MIB, on_memory="shrink")
    assert "--max-model-len" not in str(caught.value)


def test_on_a_card_embeddings_move_to_the_host_only_when_they_have_to(model: ModelConfig) -> None:
    config = EngineConfig(max_model_len=1024)
    plan = memory_plan(config, model, "cuda")
    enough = plan.fixed_bytes + plan.cache_bytes(1024)
    assert place_embeddings(config, plan, model, enough) is plan
    moved = place_embeddings(config, plan, model, enough - 1)
    assert moved.embeddings_on_host
    assert plan.fixed_bytes - moved.fixed_bytes == WEIGHTS.embeddings_bytes
    pinned = replace(config, embedding_device="device")
    assert place_embeddings(pinned, plan, model, enough - 1) is plan


def test_on_a_card_everything_free_but_a_stated_reserve_is_used() -> None:
    assert usable_on_card(EngineConfig(), 24 * GIB, 23 * GIB) == 23 * GIB - GIB // 4
    half = EngineConfig(gpu_memory_utilization=0.5)
    assert usable_on_card(half, 24 * GIB, 23 * GIB) == 11 * GIB


def test_on_a_cpu_the_memory_suggested_is_enough_and_a_little_less_is_not(
    model: ModelConfig,
) -> None:
    def ask(free: int) -> Question:
        return Question(
            config=EngineConfig(max_model_len=8192),
            model=model,
            format_name="dense",
            weights=WEIGHTS,
            block_bytes={"auto": BLOCK_BYTES},
            cache_format="auto",
            itemsize=2,
            target=Target(name="x", device_type="cpu", total_bytes=free, reserve_bytes=0),
        )

    found = next(s for s in advise(judge(ask(400 * MIB))) if s.change == "memory")
    gib = float(found.text.split()[3])
    assert judge(ask(int((gib + 0.05) * GIB))).fits
    assert not judge(ask(int((gib - 0.1) * GIB))).fits
