"""What prompts in bfloat16 compute in one pass, against float64 and against torch's operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from ingle.attention.joined import JOINED
from ingle.config import EngineConfig
from ingle.engine.background_compiler import BackgroundCompiler
from ingle.engine.engine import build_engine_core
from ingle.engine.function_compiler import FunctionCompiler
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest
from ingle.model.decoder import Decoder
from ingle.model.function_package import example_arguments
from ingle.model.layers import FullRMSNorm, RMSNorm, activation
from ingle.model.prompt_functions import (
    FULL_NORMED,
    GATED_GELU_TANH,
    GATED_SILU,
    NORMED,
    ONE_STEP,
    TURNED,
)
from ingle.model.prompt_parts import prompt_functions
from ingle.model.rotary import rotate
from ingle.plugin.compiled_function import Compilable, CompiledFunction
from ingle.request import SamplingParams

ALL = (NORMED, FULL_NORMED, GATED_SILU, GATED_GELU_TANH, TURNED, JOINED)
ROUNDINGS = {NORMED.name: 2, GATED_SILU.name: 2, GATED_GELU_TANH.name: 2, TURNED.name: 2}
"""Of one result, as the operators round; the others round once."""


def by_float64(source: Compilable, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the function is about, written another way."""
    wide = [one.double() for one in given]
    if source in (NORMED, FULL_NORMED):
        x, weight, eps, _ = wide
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / x.shape[-1]
        return x / (mean + eps).sqrt() * weight
    if source is GATED_SILU:
        return wide[0][:, 0] / (1 + (-wide[0][:, 0]).exp()) * wide[0][:, 1]
    if source is GATED_GELU_TANH:
        x = wide[0][:, 0]
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + inner.tanh()) * wide[0][:, 1]
    if source is TURNED:
        x, cos, sin = wide[0][:, : wide[3].shape[1]], wide[1][:, None], wide[2][:, None]
        return x * cos + x.flip(2) * sin
    own, lse, before, lse_before, _ = wide
    weights = torch.softmax(torch.stack((lse, lse_before)), 0).mT.unsqueeze(-1)
    return weights[0] * own + weights[1] * before


@pytest.mark.parametrize("source", ALL, ids=lambda source: source.name.rpartition(":")[2])
def test_functions_are_right_to_their_roundings(source: Compilable) -> None:
    given = example_arguments(source)
    source.function(*given)
    wanted = by_float64(source, given)
    # Sums may cancel: a rounding of the larger of two addends, of some 4 at most, beside those.
    allowed = ROUNDINGS.get(source.name, 1) * ONE_STEP / 2
    atol = 4 * ONE_STEP / 2 if source is TURNED else 1e-3
    torch.testing.assert_close(given[-1].double(), wanted, rtol=1.01 * allowed, atol=atol)


def operators(source: Compilable, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the layers compute without the function."""
    if source is NORMED:
        return RMSNorm(given[1], float(given[2]))(given[0])
    if source is FULL_NORMED:
        return FullRMSNorm(given[1], float(given[2]))(given[0])
    if source is TURNED:
        x, cos, sin = (one.flatten(-2) for one in given[:3])
        return rotate(x[:, : given[3].shape[1]], cos[:, None], sin[:, None]).view(given[3].shape)
    name = "silu" if source is GATED_SILU else "gelu_pytorch_tanh"
    return activation(name)(given[0][:, 0]) * given[0][:, 1]


@pytest.mark.parametrize("source", ALL[:-1], ids=lambda source: source.name.rpartition(":")[2])
def test_functions_round_where_operators_do(source: Compilable) -> None:
    given = example_arguments(source)
    source.function(*given)
    assert torch.equal(given[-1], operators(source, given))


FAMILIES = ("LlamaConfig", "Qwen3Config", "Olmo2Config", "Gemma2Config", "MixtralConfig")


def open_runner(folder: Path, demo_model_dir: Path, name: str) -> tuple[ModelRunner, Decoder]:
    torch.manual_seed(0)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, name)(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        **none,
    )
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    core = build_engine_core(
        EngineConfig(model=str(folder), device="cpu", block_size=16, enforce_eager=True)
    )
    assert isinstance(core.runner, ModelRunner)
    assert isinstance(core.runner.model, Decoder)
    return core.runner, core.runner.model


def share(name: str, tokens: list[int], start: int, first_block: int) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=name,
        token_ids=tokens[start:],
        num_computed_tokens=start,
        block_table=tuple(range(first_block, first_block + 12)),
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=tokens,
        output_token_ids=[],
        samples=False,
    )


def logits(runner: ModelRunner, *shares: ScheduledRequest) -> torch.Tensor:
    with torch.inference_mode():
        hidden = runner.model.hidden_states(runner._batch(shares), runner.caches)
        return runner.model.logits(hidden)


def runs(runner: ModelRunner) -> list[torch.Tensor]:
    """A prompt in two chunks, three sequences at once, one of which decodes, and two that do."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(128, (190,), generator=generator).tolist()
    first = logits(runner, share("a", tokens[:83], 0, 1))
    second = logits(runner, share("a", tokens[:170], 83, 1))
    mixed = logits(
        runner,
        share("b", tokens[:75], 0, 13),
        share("a", tokens[:171], 170, 1),
        share("c", tokens[100:105], 0, 25),
    )
    both = logits(runner, share("a", tokens[:172], 171, 1), share("c", tokens[100:106], 5, 25))
    return [first, second, mixed, both]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_come_out_as_by_operators(tmp_path: Path, demo_model_dir: Path, name: str) -> None:
    runner, model = open_runner(tmp_path, demo_model_dir, name)
    runner.model = replace(model, pads_prompts=False)
    plain = runs(runner)
    runner.model = replace(model, pads_prompts=True)
    padded = runs(runner)
    called = set()
    for function in prompt_functions(model):
        source = function.source

        def run(tensors: list[torch.Tensor], source: Compilable = source) -> None:
            assert all(one.is_contiguous() for one in tensors)
            called.add(source.name)
            source.function(*tensors)

        function.use(run)
    fused = runs(runner)
    for one, other, wanted in zip(padded, fused, plain, strict=True):
        assert one.shape == other.shape == wanted.shape
        assert relative_error(one, wanted) < 1e-2
        assert relative_error(other, wanted) < 2e-2
    assert called == {function.source.name for function in prompt_functions(model)}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_functions_give_what_the_written_ones_do(tmp_path: Path) -> None:
    functions = [CompiledFunction(source) for source in ALL]
    job = FunctionCompiler(functions, tmp_path)
    BackgroundCompiler((job,)).compile_now()
    for function in functions:
        source = function.source
        assert function.is_compiled, source.name
        for rows in (2, 67, 300):
            found = example_arguments(replace(source, usual={**source.usual, "rows": rows}))
            wanted = [one.clone() for one in found]
            function(*found)
            source.function(*wanted)
            error = source.max_relative_error
            torch.testing.assert_close(found[-1], wanted[-1], rtol=error, atol=0)
            assert (found[-1] != wanted[-1]).float().mean() < 1e-3, source.name
