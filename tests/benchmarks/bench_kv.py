"""KV caches on this CPU at 4,000 cached tokens: decode steps of every type in turns, and prompts.

One engine per cache type, in one process, its decode steps compiled. ``bf16`` is the cache that the
others are compared with. Prompts are compared with what they cannot do without: the products of
all layers' matrices, and attention as transformers calls it. The settings are those that
the ``ingle`` command gives itself.

    python tests/benchmarks/bench_kv.py [MODEL] [--tokens 4000] [--rounds 30]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ingle.cli.restart import restart_with_settings
from ingle.config import EngineConfig
from ingle.demo_model import default_demo_model
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest, SchedulerOutput
from ingle.model.compiled_decoder import CompiledDecoder
from ingle.model.decoder import Decoder, DecoderLayer, Layer
from ingle.model.feed_forward import MLP
from ingle.model.linear import Linear
from ingle.plugin.cache_folder import default_cache_folder
from ingle.request import SamplingParams

FORMATS = ("auto", "int8", "fp8_e5m2", "fp8_e4m3", "int4", "k=int8,v=int4")
CHUNK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An engine core, and its decoder as it was loaded."""

    name: str
    core: EngineCore
    model: Decoder
    blocks: tuple[int, ...]

    @property
    def runner(self) -> ModelRunner:
        runner = self.core.runner
        assert isinstance(runner, ModelRunner)
        return runner

    def run(self, tokens: list[int], start: int) -> None:
        """``tokens[start:]`` after what is cached of ``tokens[:start]``."""
        share = ScheduledRequest(
            request_id="r",
            token_ids=tokens[start:],
            num_computed_tokens=start,
            block_table=self.blocks,
            params=SamplingParams(temperature=0),
            seed=0,
            prompt_token_ids=tokens,
            output_token_ids=[],
            samples=True,
        )
        self.runner.execute(SchedulerOutput(scheduled=(share,)))

    def prefill(self, tokens: list[int]) -> float:
        """Seconds."""
        begin = time.perf_counter()
        for start in range(0, len(tokens), CHUNK):
            self.run(tokens[: start + CHUNK], start)
        return time.perf_counter() - begin


def opened(model: str, name: str, num_tokens: int, *, eager: bool) -> Opened:
    core = build_engine_core(
        EngineConfig(
            model=model,
            device="cpu",
            dtype="bfloat16",
            kv_cache_dtype=name,
            max_model_len=num_tokens + 256,
            max_num_seqs=1,
            enforce_eager=eager,
        )
    )
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    decoder: object = runner.model
    if isinstance(decoder, CompiledDecoder):
        decoder = decoder._model
    for compiler in core.compilers:
        compiler.compile_now()
    assert isinstance(decoder, Decoder)
    count = -(-(num_tokens + 1) // runner.block_size)
    return Opened(name=name, core=core, model=decoder, blocks=tuple(range(1, count + 1)))


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class _Attention(torch.nn.Module):
    """What transformers' attention asks of the layer that calls it."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.eval()


class LeastPrompt:
    """What a prompt cannot do without: every layer's products and transformers' attention, in
    order, each once on what the one before it made; whole prompts, nothing in between.

    Args:
        model: Whose sizes they have; weights are random.
        num_tokens: T.
    """

    def __init__(self, model: Decoder, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return (torch.randn(size, generator=generator) / size[-1] ** 0.5).bfloat16()

        self.shape = model.layers[0].attention.shape
        self.weights = [
            [random(sum(p.weight.out_features for p in one.parts), one.parts[0].weight.in_features)
             for one in _linears(layer)]
            for layer in model.layers
        ]  # fmt: skip
        self.x = random(num_tokens, model.embedding.shape[1])
        self.inner = random(num_tokens, self.weights[0][3].shape[1])
        groups = self.shape.num_heads // self.shape.num_kv_heads
        self.module = _Attention(groups)

    def __call__(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        x = self.x
        for qkv, o, gate_up, down in self.weights:
            x = linear(self._attend(linear(x, qkv)), o)
            linear(x, gate_up)
            x = linear(self.inner, down)
        return time.perf_counter() - begin

    def _attend(self, heads: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        split = heads.view(1, heads.shape[0], -1, shape.head_dim).transpose(1, 2)
        q, k, v = split.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        out, _ = sdpa_attention_forward(self.module, q, k, v, None)
        return out.reshape(heads.shape[0], -1)


def _linears(layer: Layer) -> tuple[Linear, ...]:
    assert isinstance(layer, DecoderLayer)
    mlp, attention = layer.mlp, layer.attention
    assert isinstance(mlp, MLP)
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prompts", type=int, default=3)
    given = parser.parse_args()
    model = given.model or str(default_demo_model(default_cache_folder()))
    engines = [opened(model, name, given.tokens, eager=given.eager) for name in given.formats]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, 20000, (given.tokens,), generator=generator).tolist()
    with torch.inference_mode():
        report_prompts(engines, tokens, max(1, given.prompts))
        report_steps(engines, tokens, given.rounds)


def report_prompts(engines: list[Opened], tokens: list[int], rounds: int) -> None:
    """Every engine's cache is filled."""
    for one in engines:
        one.prefill(tokens[: len(tokens) // 2])
    times: dict[str, list[float]] = {one.name: [] for one in engines}
    before = peak_mib()
    for one in engines:
        one.prefill(tokens)
    grown = peak_mib() - before
    least_prompt, least = LeastPrompt(engines[0].model, len(tokens)), []
    least_prompt()
    for _ in range(rounds):
        for one in engines:
            times[one.name].append(one.prefill(tokens))
        least.append(least_prompt())
    bound = statistics.median(least)
    print(f"prompt of {len(tokens)}: products and transformers' attention alone {bound:.2f} s")
    print(f"({min(least):.2f} to {max(least):.2f});")
    print(f"peak memory {grown:.0f} MiB above that of a prompt half as long")
    for name, found in times.items():
        middle = statistics.median(found)
        ratios = sorted(mine / other for mine, other in zip(found, least, strict=True))
        print(
            f"| `{name}` | {middle:.2f} s ({min(found):.2f} to {max(found):.2f}) | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )


def report_steps(engines: list[Opened], tokens: list[int], rounds: int) -> None:
    times: dict[str, list[float]] = {one.name: [] for one in engines}
    for turn in range(rounds + 2):
        for one in engines:
            spent = seconds(lambda one=one: one.run([*tokens, 7], len(tokens)))
            if turn > 1:
                times[one.name].append(spent)
    base = statistics.median(times[engines[0].name])
    print(f"decode steps at {len(tokens)} cached tokens, {rounds} of each in turns")
    for name, found in times.items():
        middle = statistics.median(found)
        print(
            f"| `{name}` | {middle * 1e3:.1f} ms ({min(found) * 1e3:.1f} to "
            f"{max(found) * 1e3:.1f}) | {base / middle:.2f} |"
        )


if __name__ == "__main__":
    restart_with_settings(["bench"])
    main()
