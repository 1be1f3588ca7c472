"""Whole models of random packed weights for ``bench_gpu.py``: tokens a second of the decode step as
one graph, and the time to the first token of a prompt.

What runs is the engine's own decoder and graph step, on weights that mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bench_gpu_weights as weights
import torch
from bench_gpu_timing import Bench, Row

from ingle.attention.decode_launches import DecodeLaunches
from ingle.attention.decode_rows import StepPlanner
from ingle.attention.layer_cache import LayerCache
from ingle.attention.metadata import ForwardBatch, SequenceSpan
from ingle.attention.paged_cuda import PagedCUDAAttention, PagedScratch
from ingle.attention.paged_triton import Softmax
from ingle.builtin.affine_cuda_weight import decode_tiles
from ingle.builtin.affine_triton import MAX_ROWS, PackedW4, default_w4_config, matmul_w4
from ingle.builtin.kv_native import BlockMajorStore, NativeKVCache
from ingle.engine.device_step import RowStart
from ingle.engine.graph_step import GraphStep, StepSize
from ingle.model.decoder import Decoder, DecoderLayer, HeadShape, SelfAttention
from ingle.model.feed_forward import MLP
from ingle.model.layers import RMSNorm
from ingle.model.rope_frequencies import RopeFrequencies
from ingle.model.rotary import RotaryTable
from ingle.plugin.kv_cache import KVCacheGeometry
from ingle.request import SamplingParams
from ingle_quant_exl2.kernel import Exl2Config, matmul_exl2
from ingle_quant_exl2.planes import PackedExl2

PAGE, HEAD_DIM = 256, 128
CONTEXT = 1024
ROOM = 1.15
"""Memory needed beside the weights, as a factor: cache, workspace, a prompt's activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama; ``bits`` of its linears."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    bits: float

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """[N, K] of a layer's linears."""
        rows = (self.heads + 2 * self.kv_heads) * HEAD_DIM
        return (
            (rows, self.hidden),
            (self.hidden, self.heads * HEAD_DIM),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads, cache apart: linears and an fp16 head."""
        layer = sum(n * k for n, k in self.linears) * self.bits / 8
        return int(self.layers * layer) + 2 * self.vocab * self.hidden


TINY = Shape(name="tiny", hidden=128, inner=128, layers=1, heads=1, kv_heads=1, vocab=64, bits=4.25)
LLAMA_8B = Shape(
    name="Llama-3-8B", hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocab=128256,
    bits=4.25,
)  # fmt: skip
LLAMA_70B = Shape(
    name="Llama-3-70B", hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8, vocab=128256,
    bits=2.4,
)  # fmt: skip


class PackedLinear:
    """A product with a packed weight, as the decoder calls it."""

    def __init__(self, bench: Bench, packed: PackedW4 | PackedExl2) -> None:
        self._bench, self._packed = bench, packed

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        packed, space = self._packed, self._bench.workspace
        if x.shape[0] > MAX_ROWS:
            return self._decoded(x, residual)
        out = x.new_empty(x.shape[0], packed.out_features)
        if isinstance(packed, PackedExl2):
            return matmul_exl2(x, packed, Exl2Config(), out=out, workspace=space, residual=residual)
        shape = (packed.out_features, packed.in_features)
        config = self._bench.best.get(shape) or default_w4_config(packed, self._bench.num_sms)
        return matmul_w4(x, packed, config, out=out, workspace=space, residual=residual)

    def _decoded(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Many rows: decoded some output features at a time, then cuBLAS."""
        packed = self._packed
        if not isinstance(packed, PackedW4):
            raise TypeError("prompts are timed with 4-bit weights only")
        step = max(1, (1 << 24) // (16 * packed.in_features))
        tiles = packed.out_features // 16
        parts = [
            x @ decode_tiles(packed, at, min(at + step, tiles), x.dtype).T
            for at in range(0, tiles, step)
        ]
        out = torch.cat(parts, 1)
        return out if residual is None else out + residual


class DenseHead:
    """The output head."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight)


def build(
    bench: Bench, shape: Shape, make: Callable[[int, int, int], Any]
) -> tuple[Decoder, list[LayerCache]]:
    """A decoder of ``shape``; ``make(layer, n, k)`` gives a packed weight."""
    device = bench.device
    backend: Any = PagedCUDAAttention(
        Softmax(scale=HEAD_DIM**-0.5),
        PagedScratch(StepPlanner(PAGE), DecodeLaunches(num_sms=bench.num_sms)),
    )
    ones = torch.ones(shape.hidden, dtype=torch.float16, device=device)
    heads = HeadShape(num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=HEAD_DIM)
    layers, caches = [], []
    for layer in range(shape.layers):
        qkv, o, gate_up, down = (PackedLinear(bench, make(layer, n, k)) for n, k in shape.linears)
        attention: Any = SelfAttention(shape=heads, qkv_proj=qkv, o_proj=o, backend=backend)  # type: ignore[arg-type]
        mlp: Any = MLP(gate_up_proj=gate_up, down_proj=down, activation=torch.nn.functional.silu)  # type: ignore[arg-type]
        layers.append(
            DecoderLayer(
                input_norm=RMSNorm(ones, 1e-5),
                attention=attention,
                post_attention_norm=RMSNorm(ones, 1e-5),
                mlp=mlp,
            )
        )
        caches.append(_cache(bench, shape))
    inverse = 1 / 500000 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    table = RotaryTable(
        RopeFrequencies(inverse=inverse), _blocks(bench) * PAGE, torch.float16, device
    )
    head = (torch.rand(shape.vocab, shape.hidden, device=device) * 0.02).half()
    lm_head: Any = DenseHead(head)
    return Decoder(
        embedding=head, layers=tuple(layers), norm=RMSNorm(ones, 1e-5), lm_head=lm_head,
        rotaries=(table,),
    ), caches  # fmt: skip


def _blocks(bench: Bench) -> int:
    return 2 if bench.small else CONTEXT // PAGE + 4


def _cache(bench: Bench, shape: Shape) -> LayerCache:
    stores = [
        BlockMajorStore(
            KVCacheGeometry(
                side=side, num_kv_heads=shape.kv_heads, head_dim=HEAD_DIM, block_size=PAGE,
                dtype=torch.float16,
            ),
            _blocks(bench) + 1,
            str(bench.device),
        )
        for side in ("k", "v")
    ]  # fmt: skip
    form = NativeKVCache()
    return LayerCache(k_format=form, v_format=form, k_store=stores[0], v_store=stores[1])


def model_section(bench: Bench, deadline: float) -> list[Row]:
    """Synthetic models: tokens a second at 1k of context, time to the first token of 1k."""
    rows: list[Row] = []
    for shape in (TINY,) if bench.small else (LLAMA_8B, LLAMA_70B):
        what = f"{shape.name} {shape.bits} bpw"
        needed = int(ROOM * shape.nbytes)
        free = needed if bench.small else torch.cuda.mem_get_info()[0]
        if free < needed:
            rows.append({"what": what, "skipped": f"needs {needed / 1e9:.0f} GB free"})
            continue
        model, caches = build(bench, shape, _maker(bench, shape))
        rows.append({"what": f"{what} decode", **decode(bench, shape, model, caches)})
        if shape is not LLAMA_70B:
            rows.append({"what": f"{what} prompt", **first_token(bench, model, caches)})
        del model, caches
        bench.recover()
    return rows


def _maker(bench: Bench, shape: Shape) -> Callable[[int, int, int], Any]:
    """Random weights, other memory for every layer."""
    if shape.bits > 4:
        return lambda layer, n, k: weights.random_w4(n, k, bench.device, random_words=True)
    made: dict[tuple[int, int], PackedExl2] = {}

    def exl2(layer: int, n: int, k: int) -> PackedExl2:
        if (n, k) not in made:
            wide = 2 * (k // 64) // 5  # of five groups, two of 3 bits and three of 2: 2.4
            groups = [(3, 64)] * wide + [(2, 64)] * (k // 64 - wide)
            made[n, k] = weights.random_exl2(groups, n, bench.device)
        return weights.clone(made[n, k])

    return exl2


def decode(bench: Bench, shape: Shape, model: Decoder, caches: list[LayerCache]) -> Row:
    """Steps of one sequence, enqueued one after another, tokens read a step late."""
    size = StepSize(num_rows=1, num_blocks=_blocks(bench), block_size=PAGE)
    step = GraphStep(model, caches, size)
    if not bench.small:
        step.capture()
    position = 20 if bench.small else CONTEXT
    table = list(range(1, _blocks(bench) + 1))
    greedy = SamplingParams(temperature=0.0)
    step.place(
        0,
        RowStart(
            token_id=1, position=position, block_table=table, params=greedy, seed=0, num_output=1
        ),
    )
    count = 2 if bench.small else 200
    if not bench.small:
        step.tokens(step.run())  # warms up
    begun, drawn = time.perf_counter(), []
    number = step.run()
    for _ in range(count - 1):
        following = step.run()
        drawn.append(step.tokens(number)[0])
        number = following
    drawn.append(step.tokens(number)[0])
    seconds = (time.perf_counter() - begun) / count
    rate = bench.rate(shape.nbytes, seconds)
    in_range = all(0 <= token < shape.vocab for token in drawn)
    return {"tokens/s": 1 / seconds, **rate, "ok": in_range}


def first_token(bench: Bench, model: Decoder, caches: list[LayerCache]) -> Row:
    """Milliseconds from a prompt to its first token; the second time, for the first compiles."""
    length = 40 if bench.small else CONTEXT
    table = list(range(1, -(-length // PAGE) + 1))
    positions = torch.arange(length, device=bench.device)
    batch = ForwardBatch(
        token_ids=positions % model.embedding.shape[0],
        positions=positions,
        slot_mapping=positions + PAGE,  # blocks from 1 on, in order
        spans=(
            SequenceSpan(start=0, stop=length, seq_len=length, block_table=table, first_block=1),
        ),
    )
    seconds = 0.0
    with torch.inference_mode():
        for _ in range(1 if bench.small else 2):
            begun = time.perf_counter()
            hidden = model.hidden_states(batch, caches)
            int(model.logits(hidden[-1:]).argmax())
            seconds = time.perf_counter() - begun
    return {"tokens": length, "ms": 1e3 * seconds, "tokens/s": length / seconds}
