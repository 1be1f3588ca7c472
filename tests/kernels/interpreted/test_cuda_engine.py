"""An engine that believes it runs on a CUDA card, in the interpreter, against the one on a CPU:
plugin choice, self-checks, packed weights, block-major caches, decode attention, sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted_device import CARD

from ingle.attention.paged_cuda import PagedCUDAAttention
from ingle.config import EngineConfig
from ingle.engine import engine
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest, SchedulerOutput
from ingle.model.decoder import Decoder
from ingle.request import SamplingParams

pytestmark = pytest.mark.usefixtures("installed_plugins")


def open_core(folder: Path, **options: Any) -> EngineCore:
    return engine.build_engine_core(
        EngineConfig(
            model=str(folder),
            device="cpu",
            block_size=16,
            dtype="float16",
            kv_cache_memory_bytes=1 << 20,
            strict_plugins=True,
            **options,
        )
    )


def open_on_card(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> EngineCore:
    monkeypatch.setattr(engine, "choose_device", lambda requested: CARD)
    monkeypatch.setattr(engine, "available_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(engine, "held_bytes", lambda device: None)
    return open_core(folder, **options)


def share(name: str, token_ids: list[int], start: int, table: list[int]) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=name,
        token_ids=token_ids[start:],
        num_computed_tokens=start,
        block_table=table,
        params=SamplingParams(temperature=0),
        seed=0,
        prompt_token_ids=token_ids,
        output_token_ids=[],
        samples=True,
    )


def logits_of(core: EngineCore) -> list[torch.Tensor]:
    """Two prompts, one of them in chunks, then decode steps mixed with a chunk and without."""
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    a, b = [*range(3, 45)], [*range(90, 60, -1)]
    tables = {"a": [5, 2, 9], "b": [1, 7, 3]}
    steps = [
        [("a", a[:40], 0)],
        [("a", a[:41], 40), ("b", b[:20], 0)],
        [("b", b[:29], 20), ("a", a[:42], 41)],
        [("a", [*a, 8], 42), ("b", b[:30], 29)],
    ]
    found = []
    for step in steps:
        plan = tuple(share(name, tokens, start, tables[name]) for name, tokens, start in step)
        with torch.inference_mode():
            hidden = runner.model.hidden_states(runner._batch(plan), runner.caches)
            found.append(runner.model.logits(hidden))
        assert len(runner.execute(SchedulerOutput(scheduled=plan)).sampled) == len(plan)
    return found


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("cache", "bound"),
    [
        ("auto", 4e-3),
        ("fp8", 1e-2),
        pytest.param("fp8_e5m2", 1e-2, marks=pytest.mark.slow),
        pytest.param("k=fp8,v=auto", 1e-2, marks=pytest.mark.slow),
    ],
)
def test_an_engine_on_a_card_computes_what_one_on_a_cpu_computes(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    bound: float,
) -> None:
    wanted = logits_of(open_core(checkpoint, kv_cache_dtype=cache))
    core = open_on_card(checkpoint, monkeypatch, kv_cache_dtype=cache, enforce_eager=True)
    found = logits_of(core)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) < bound


def test_packed_linears_get_the_triton_kernel_and_attention_reads_in_place(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = open_on_card(checkpoint, monkeypatch, enforce_eager=True)
    chosen = core.info.plugin_report["chosen"]
    assert chosen["linears_per_kernel"]["w4_triton"] == 4  # qkv and gate_up are fused
    assert set(chosen["linears_per_kernel"]) == {"w4_triton", "dense_torch"}
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    backend = runner.model.layers[0].attention.backend
    assert isinstance(backend, PagedCUDAAttention)
