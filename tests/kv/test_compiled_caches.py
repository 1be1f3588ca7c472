"""Compiled decode steps read and write quantised caches in place: the functions that are compiled,
run as they are, against the decoder they stand in for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ingle.attention.metadata import SequenceSpan
from ingle.engine.background_compiler import BackgroundCompiler
from ingle.engine.decode_compiler import DecodeCompiler
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest
from ingle.model.compiled_decoder import CompiledDecoder
from ingle.model.decoder import Decoder
from ingle.model.segment_cache import cache_sides
from ingle.model.segment_package import MAX_RELATIVE_ERROR, example_state, segment_module
from ingle.model.segment_plan import segment_shapes, segment_weights
from ingle.request import SamplingParams
from ingle.testing.eager_segments import eager_decoder

BLOCKS = [3, 1, 2, 4]
CACHES = ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "k=auto,v=int8", "k=int8,v=int4", "fixed16"]
IN_PLACE = [name for name in CACHES if name != "fixed16"]
"""``fixed16`` is a stranger's format, which knows nothing of compiled steps."""


@pytest.fixture(scope="module")
def tiny(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers in bf16."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=256,
        **heads,
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return folder


def opened(open_core: Any, tiny: Path, cache: str) -> tuple[EngineCore, ModelRunner, Decoder]:
    core = open_core(tiny, cache, dtype="bfloat16", block_size=16, enforce_eager=False)
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    return core, runner, model


def step(runner: ModelRunner, token_ids: list[int], start: int) -> torch.Tensor:
    """Logits after ``token_ids[start:]``, the tokens before being in the cache: [T, V]."""
    share = ScheduledRequest(
        request_id="r",
        token_ids=token_ids[start:],
        num_computed_tokens=start,
        block_table=BLOCKS,
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=token_ids,
        output_token_ids=[],
        samples=False,
    )
    with torch.inference_mode():
        hidden = runner.model.hidden_states(runner._batch((share,)), runner.caches)
        return runner.model.logits(hidden)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("cache", CACHES)
def test_a_step_computes_and_stores_what_the_layers_do(
    stranger: None, open_core: Any, tiny: Path, cache: str
) -> None:
    _, runner, model = opened(open_core, tiny, cache)
    assert (cache_sides(runner.caches) is not None) == (cache in IN_PLACE)
    token_ids = list(range(20, 60))
    wanted = [step(runner, token_ids[:20], 0)]
    wanted += [step(runner, token_ids[: at + 1], at) for at in range(20, len(token_ids))]
    held = stored(runner, len(token_ids))
    step(runner, token_ids[:20], 0)
    runner.model = eager_decoder(runner, model)
    found = [step(runner, token_ids[: at + 1], at) for at in range(20, len(token_ids))]
    bound = 0.05 if "int4" in cache else 2e-2
    assert relative_error(torch.cat(found), torch.cat(wanted[1:])) < bound
    for side, before in zip(stored(runner, len(token_ids)), held, strict=True):
        assert relative_error(side, before) < 2 * bound


def stored(runner: ModelRunner, length: int) -> list[torch.Tensor]:
    """Copies of every layer's keys and values of the first ``length`` tokens."""
    span = SequenceSpan(start=0, stop=1, seq_len=length, block_table=BLOCKS, first_block=None)
    with torch.inference_mode():
        return [side.clone() for cache in runner.caches for side in cache.read(span)]


@pytest.mark.parametrize("cache", ["auto", "int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_examples_tell_roundings_of_several_layers_from_errors(
    open_core: Any, demo_model_dir: Path, cache: str
) -> None:
    """Packages are tried out with them: those of quantised caches were all found wrong once."""
    _, runner, model = opened(open_core, demo_model_dir, cache)
    shapes = segment_shapes(model, 16, cache_sides(runner.caches))
    assert shapes is not None
    shape = shapes.layers
    assert len(shape.layers) > 4
    weights = segment_weights(model).layers[: len(shape.layers)]
    found = []
    for nudge in (0.0, 2.0**-9):
        (turned, *rest), *others = example_state(shape)
        noise = torch.randn(turned.shape, generator=torch.Generator().manual_seed(1))
        state = ((turned * (1 + nudge * noise)).to(turned.dtype), *rest)
        with torch.inference_mode():
            found.append(segment_module(shape)(state, *others, weights)[0])
    assert relative_error(found[1], found[0]) < MAX_RELATIVE_ERROR * len(shape.layers) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["int8", "fp8_e4m3"])
def test_compiled_they_do_the_same(open_core: Any, tiny: Path, tmp_path: Path, cache: str) -> None:
    _, runner, model = opened(open_core, tiny, cache)
    token_ids = list(range(20, 60))
    step(runner, token_ids[:20], 0)
    wanted = [step(runner, token_ids[: at + 1], at) for at in range(20, len(token_ids))]
    shapes = segment_shapes(model, 16, cache_sides(runner.caches))
    assert shapes is not None
    compiler = BackgroundCompiler([DecodeCompiler(runner, model, shapes, tmp_path)])
    compiler.compile_now()
    assert isinstance(runner.model, CompiledDecoder)
    found = [step(runner, token_ids[: at + 1], at) for at in range(20, len(token_ids))]
    assert relative_error(torch.cat(found), torch.cat(wanted)) < 2e-2
