"""The sections of ``bench_gpu.py``. Each returns rows: plain dicts of names and numbers.

Bandwidth counts the bytes of weights (words, scales, zeros) or of keys and values, over the time of
a kernel inside a CUDA graph whose launches rotate over copies that together exceed the L2 cache
threefold. ``share`` is that over the measured copy bandwidth of this very card.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import bench_gpu_weights as weights
import torch
from bench_gpu_model import model_section
from bench_gpu_peers import peers_section
from bench_gpu_timing import Bench, Launch, Row, capture, relative_error, replay_seconds

from ingle.attention.paged_triton import (
    PagedConfig,
    PagedRows,
    Softmax,
    paged_attention,
    workspace_bytes,
)
from ingle.builtin.affine_triton import (
    PackedW4,
    W4Config,
    default_w4_config,
    matmul_w4,
    matmul_w4_reference,
)
from ingle_quant_exl2.kernel import Exl2Config, matmul_exl2, matmul_exl2_reference
from ingle_quant_exl2.planes import PackedExl2, plan_splits

# Llama-3-8B's o, gate and up, down; Llama-3-70B's o, gate and up, down
W4_SHAPES = (
    (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672),
)  # fmt: skip
MAX_ERROR = 1e-4  # of an fp32 output against fp64; the tensor core's own is some 1e-6
MAX_ATTENTION_ERROR = 1e-3  # probabilities are rounded to fp16


def copy_section(bench: Bench, deadline: float) -> list[Row]:
    """Copy bandwidth: what every share below is a share of."""
    size = 1 << (16 if bench.small else 30)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds([lambda: target.copy_(source)] * 8)
    bench.copy_gbs = 2 * size / seconds / 1e9
    return [{"what": "copy 1 GiB", "us": seconds * 1e6, "GB/s": bench.copy_gbs}]


def correctness_section(bench: Bench, deadline: float) -> list[Row]:
    """Every kernel, inline assembly included, against its plain-torch reference."""
    n = k = 256 if bench.small else 4096
    rows: list[Row] = []
    rows_tried = (8,) if bench.small else (1, 8)
    for dtype, m in itertools.product((torch.float16, torch.bfloat16), rows_tried):
        x = torch.randn(m, k, device=bench.device).to(dtype)
        for group_size in (128, 32):
            packed = weights.random_w4(n, k, bench.device, group_size=group_size)
            config = replace(default_w4_config(packed, bench.num_sms), splits=2)
            out = torch.full((m, n), float("nan"), device=bench.device)
            matmul_w4(x, packed, config, out=out, workspace=bench.workspace)
            error = relative_error(out, matmul_w4_reference(x, packed))
            rows.append(_verdict(f"w4 g{group_size} {dtype} M={m}", error, MAX_ERROR))
        for name, exl2 in weights.exl2_cases(n, k, bench.device):
            out = torch.full((m, n), float("nan"), device=bench.device)
            matmul_exl2(x, exl2, Exl2Config(), out=out, workspace=bench.workspace)
            error = relative_error(out, matmul_exl2_reference(x, exl2))
            rows.append(_verdict(f"exl2 {name} {dtype} M={m}", error, MAX_ERROR))
    return rows + _attention_correctness(bench)


def _verdict(what: str, error: float, limit: float) -> Row:
    return {"what": what, "error": error, "ok": error < limit}


def _attention_correctness(bench: Bench) -> list[Row]:
    rows = []
    length = 70 if bench.small else 5000
    hardware = bench.small or torch.cuda.get_device_capability() >= (8, 9)
    for fp8, page, tokens in itertools.product(
        (False, True), (16, 256), (4,) if bench.small else (1, 4)
    ):
        for by_card in {False, hardware} if fp8 else {False}:
            cache = weights.random_cache(bench.device, length, page, fp8=fp8, by_card=by_card)
            query = cache.query.repeat(tokens, 1, 1) * torch.rand_like(cache.query)
            out = torch.full_like(query, float("nan"))
            config = PagedConfig(splits=4, num_warps=4)
            _attend(bench, cache, cache.rows(new=tokens), config, (query, out))
            want = cache.reference(query)
            what = f"attention fp8={fp8} by_card={by_card} page={page} T={tokens}"
            rows.append(_verdict(what, relative_error(out, want), MAX_ATTENTION_ERROR))
    return rows


def w4_section(bench: Bench, deadline: float) -> list[Row]:
    """4-bit bandwidth, a sweep of block, splits, prefetch and stages; best five per shape."""
    shapes = ((128, 256),) if bench.small else W4_SHAPES
    rows: list[Row] = []
    for i, (n, k) in enumerate(shapes):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(shapes) - i)
        packed = weights.random_w4(n, k, bench.device, random_words=True)
        found = []
        for config in _w4_configs(k):
            if time.monotonic() > until and found:
                break
            seconds = _w4_seconds(bench, packed, config, 1)
            rate = bench.rate(weights.nbytes(packed), seconds)
            found.append({"what": f"w4 {n}x{k} M=1", **_w4_knobs(config), **rate})
            if bench.small and len(found) == 2:
                break
        found.sort(key=lambda row: row["us"])
        rows += found[:5]
        best = W4Config(**{key: found[0][key] for key in _w4_knobs(W4Config())})
        bench.best[n, k] = best
        eight = bench.rate(weights.nbytes(packed), _w4_seconds(bench, packed, best, 8))
        rows.append({"what": f"w4 {n}x{k} M=8", **_w4_knobs(best), **eight})
    return rows


def _w4_knobs(config: W4Config) -> Row:
    return {
        "block_n": config.block_n,
        "splits": config.splits,
        "prefetch": config.prefetch,
        "num_stages": config.num_stages,
    }


def _w4_configs(k: int) -> Iterator[W4Config]:
    """Likely winners first, so that a short time box still finds something."""
    for loading, splits, block_n in itertools.product(
        ((True, 1), (False, 1), (False, 3), (True, 3)), (8, 4, 16, 2, 1), (32, 64, 16)
    ):
        if splits <= k // 128:
            prefetch, num_stages = loading
            yield W4Config(block_n=block_n, splits=splits, prefetch=prefetch, num_stages=num_stages)


def _w4_seconds(bench: Bench, packed: PackedW4, config: W4Config, m: int) -> float:
    x = torch.randn(m, packed.in_features, device=bench.device).half()
    out = torch.empty(m, packed.out_features, dtype=torch.float16, device=bench.device)
    copies = [weights.clone(packed) for _ in range(bench.copies(weights.nbytes(packed)))]
    return bench.seconds(
        [lambda w=w: matmul_w4(x, w, config, out=out, workspace=bench.workspace) for w in copies]
    )


def exl2_section(bench: Bench, deadline: float) -> list[Row]:
    """EXL2 bandwidth per bit mix, a sweep of block, splits and stages; best two per mix."""
    n, k = (128, 512) if bench.small else (4096, 14336)
    rows: list[Row] = []
    cases = list(weights.exl2_cases(n, k, bench.device))
    cases = cases[:1] if bench.small else [case for case in cases if case[0] in weights.TIMED]
    for i, (name, packed) in enumerate(cases):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(cases) - i)
        found = []
        for stages, splits, block_n in itertools.product((1, 3), (8, 16, 4, 24), (32, 64)):
            if time.monotonic() > until and found:
                break
            planned = plan_splits(packed, splits)
            config = Exl2Config(block_n=block_n, num_stages=stages)
            rate = bench.rate(weights.nbytes(packed), _exl2_seconds(bench, planned, config))
            knobs = {"block_n": block_n, "splits": planned.splits, "num_stages": stages}
            found.append({"what": f"exl2 {name} {n}x{k} M=1", **knobs, **rate})
            if bench.small:
                break
        found.sort(key=lambda row: row["us"])
        rows += found[:2]
    return rows


def _exl2_seconds(bench: Bench, packed: PackedExl2, config: Exl2Config) -> float:
    x = torch.randn(1, packed.in_features, device=bench.device).half()
    out = torch.empty(1, packed.out_features, dtype=torch.float16, device=bench.device)
    copies = [weights.clone(packed) for _ in range(bench.copies(weights.nbytes(packed)))]
    return bench.seconds(
        [lambda w=w: matmul_exl2(x, w, config, out=out, workspace=bench.workspace) for w in copies]
    )


def soak_section(bench: Bench, deadline: float) -> list[Row]:
    """Replays split-K and split-KV many times: same bits each time, counters zero at the end."""
    n = k = 256 if bench.small else 4096
    target = 2 if bench.small else 10_000
    packed = weights.random_w4(n, k, bench.device)
    exl2 = dict(weights.exl2_cases(n, k, bench.device))["mixed"]
    cache = weights.random_cache(bench.device, 70 if bench.small else 4000, 256)
    rows, splits = cache.rows(), PagedConfig(splits=16, num_warps=4)
    x = torch.randn(1, k, device=bench.device).half()
    outs = [torch.empty(1, n, device=bench.device) for _ in range(2)]
    outs.append(torch.empty_like(cache.query))
    space, config = bench.workspace, W4Config(splits=2 if bench.small else 16)

    def launch() -> None:
        matmul_w4(x, packed, config, out=outs[0], workspace=space)
        matmul_exl2(x, exl2, Exl2Config(), out=outs[1], workspace=space)
        _attend(bench, cache, rows, splits, (cache.query, outs[2]))

    launch()
    first = [out.clone() for out in outs]
    wrong = torch.zeros(3, dtype=torch.int64, device=bench.device)

    def check() -> None:
        launch()
        for i, (out, want) in enumerate(zip(outs, first, strict=True)):
            wrong[i] += (out != want).any()

    replay = check if bench.small else capture([check]).replay
    done = 0
    while done < target and time.monotonic() < deadline:
        replay()
        done += 1
        if done % 500 == 0 and not bench.small:
            torch.cuda.synchronize()
    counters = int(bench.workspace[: 1 << 16].view(torch.int32).abs().sum())
    mismatches = wrong.tolist()
    ok = not any(mismatches) and counters == 0 and done == target
    return [{"replays": done, "mismatches": mismatches, "counters": counters, "ok": ok}]


def attention_section(bench: Bench, deadline: float) -> list[Row]:
    """Attention of one token on 1k, 8k and 32k tokens, fp16 against fp8; best of a sweep."""
    lengths = (70,) if bench.small else (1024, 8192, 32768)
    rows: list[Row] = []
    jobs = list(itertools.product(lengths, (False, True)))
    for i, (length, fp8) in enumerate(jobs):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(jobs) - i)
        used = length * weights.KV_HEADS * weights.HEAD_DIM * (2 if fp8 else 4)
        copies = bench.copies(used)
        data = weights.random_cache(bench.device, length, 256, fp8=fp8, copies=copies)
        found = []
        for splits, (block, warps) in itertools.product((16, 32, 64, 8), ((64, 2), (128, 4))):
            if time.monotonic() > until and found:
                break
            config = PagedConfig(block_tokens=block, num_warps=warps, splits=splits)
            rate = bench.rate(used, _attention_seconds(bench, data, config))
            knobs = {"block": block, "warps": warps, "splits": splits}
            found.append({"what": f"attention {length} fp8={fp8}", **knobs, **rate})
            if bench.small:
                break
        rows.append(min(found, key=lambda row: row["us"]))
    return rows


def _attend(
    bench: Bench,
    cache: weights.RandomCache,
    rows: PagedRows,
    config: PagedConfig,
    data: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """``data``: query and output."""
    query, out = data
    softmax = Softmax(scale=weights.HEAD_DIM**-0.5)
    assert workspace_bytes(query, cache.pages, rows, config) <= bench.workspace.numel()
    paged_attention(query, cache.pages, rows, config, softmax, out=out, workspace=bench.workspace)


def _attention_seconds(bench: Bench, cache: weights.RandomCache, config: PagedConfig) -> float:
    out = torch.empty_like(cache.query)
    launches = [cache.rows(copy) for copy in range(cache.tables.shape[0])]
    return bench.seconds(
        [
            lambda rows=rows: _attend(bench, cache, rows, config, (cache.query, out))
            for rows in launches
        ]
    )


def step_section(bench: Bench, deadline: float) -> list[Row]:
    """A decode step of Llama-3-8B's linears and attention in one graph: the gap between kernels."""
    layers, scale = (1, 16) if bench.small else (32, 1)
    hidden, inner = 4096 // scale, 14336 // scale
    shapes = ((hidden * 3 // 2, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    length = 70 if bench.small else 1024
    # one pool of weights per shape; 32 layers of 4.4 MB and more exceed every L2
    pool = [
        [weights.random_w4(n, k, bench.device, random_words=True) for _ in range(layers)]
        for n, k in shapes
    ]
    data = weights.random_cache(bench.device, length, 256, copies=layers)
    launches: list[Launch] = []
    alone: list[float] = []
    for packed in pool:
        alone.append(_w4_seconds(bench, packed[0], _step_config(bench, packed[0]), 1))
    alone.append(_attention_seconds(bench, data, PagedConfig(splits=16, num_warps=4)))
    for layer in range(layers):
        linears = [_step_launch(bench, packed[layer]) for packed in pool]
        linears.insert(1, _step_attention(bench, data, layer))
        launches += linears
    if bench.small:
        step = bench.seconds(launches) * len(launches)
        tiny = step
    else:
        graph = capture(launches)
        graph.replay()
        step = statistics.median(replay_seconds(graph) for _ in range(20))
        small = weights.random_w4(64, 128, bench.device)
        tiny = _w4_seconds(bench, small, W4Config(block_n=64), 1)
    nbytes = layers * sum(weights.nbytes(packed[0]) for packed in pool)
    gap = (step - layers * sum(alone)) / len(launches)
    return [
        {"what": "step, linears + attention at 1k", "ms": step * 1e3, **bench.rate(nbytes, step)},
        {"what": "a tiny kernel in a graph", "us": tiny * 1e6},
        {"what": "step minus kernels alone, per kernel", "us": gap * 1e6},
    ]


def _step_config(bench: Bench, packed: PackedW4) -> W4Config:
    shape = (packed.out_features, packed.in_features)
    return bench.best.get(shape) or default_w4_config(packed, bench.num_sms)


def _step_launch(bench: Bench, packed: PackedW4) -> Launch:
    x = torch.randn(1, packed.in_features, device=bench.device).half()
    out = torch.empty(1, packed.out_features, dtype=torch.float16, device=bench.device)
    config = _step_config(bench, packed)
    return lambda: matmul_w4(x, packed, config, out=out, workspace=bench.workspace)


def _step_attention(bench: Bench, cache: weights.RandomCache, layer: int) -> Launch:
    rows, out = cache.rows(layer), torch.empty_like(cache.query)
    config = PagedConfig(splits=16, num_warps=4)
    return lambda: _attend(bench, cache, rows, config, (cache.query, out))


@dataclass(frozen=True, slots=True)
class Section:
    """A named part of the benchmark; ``weight`` is its share of the time."""

    name: str
    weight: float
    run: Callable[[Bench, float], list[Row]]


SECTIONS = (
    Section("copy", 0.3, copy_section),
    Section("correctness", 2.0, correctness_section),
    Section("soak", 1.0, soak_section),
    Section("w4", 2.5, w4_section),
    Section("exl2", 2.0, exl2_section),
    Section("attention", 1.5, attention_section),
    Section("step", 1.0, step_section),
    Section("peers", 0.5, peers_section),
    Section("model", 1.5, model_section),
)
