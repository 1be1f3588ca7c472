"""KV caches on this CPU at 4,000 cached tokens: decode steps of every type in turns, and prompts.

One engine per cache type, in one process, its decode steps compiled. ``bf16`` is the cache that the
others are compared with. Prompts are compared with what they cannot do without: the products of
the model's matrices, and torch's attention as transformers calls it.

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
from torch.nn.functional import linear, scaled_dot_product_attention

from ingle.config import EngineConfig
from ingle.demo_model import default_demo_model
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest, SchedulerOutput
from ingle.model.compiled_decoder import CompiledDecoder
from ingle.model.decoder import Decoder
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


def least_prompt_seconds(model: Decoder, num_tokens: int) -> float:
    """A prompt's matrix products, and its attention by torch on keys repeated per query head."""
    layer = model.layers[0]
    shape = layer.attention.shape
    linears = (
        layer.attention.qkv_proj,
        layer.attention.o_proj,
        layer.mlp.gate_up_proj,  # type: ignore[union-attr]
        layer.mlp.down_proj,  # type: ignore[union-attr]
    )
    sizes = [(one.parts[0].weight.in_features, sum(p.weight.out_features for p in one.parts))
             for one in linears]  # fmt: skip
    total = 0.0
    for wide, out in sizes:
        weight, x = torch.randn(out, wide).bfloat16(), torch.randn(CHUNK, wide).bfloat16()
        linear(x, weight)
        best = min(seconds(lambda x=x, weight=weight: linear(x, weight)) for _ in range(3))
        total += best * num_tokens / CHUNK
    heads = (1, shape.num_heads, num_tokens, shape.head_dim)
    q, k, v = (torch.randn(heads).bfloat16() for _ in range(3))

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    attend()
    return (total + min(seconds(attend) for _ in range(3))) * len(model.layers)


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
    before = peak_mib()
    times: dict[str, list[float]] = {one.name: [] for one in engines}
    least = []
    for _ in range(rounds):
        for one in engines:
            times[one.name].append(one.prefill(tokens))
        least.append(least_prompt_seconds(engines[0].model, len(tokens)))
    grown = peak_mib() - before
    bound = statistics.median(least)
    print(f"prompt of {len(tokens)}: products and torch's attention alone {bound:.2f} s;")
    print(f"peak memory {grown:.0f} MiB above that of a prompt half as long")
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"| `{name}` | {middle:.2f} s | {middle / bound:.2f} |")


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
    main()
