"""Times packed 4-bit products on this CPU beside dense bfloat16 ones; ``make bench-packed``.

The two take turns, so that what else the machine does falls on both; each row of the table is the
median of the pairs' ratios. Turns are ``cold`` as they come, and ``warm`` with an untimed call
first. Targets (4096 x 4096): at 1 row 3 times as fast as torch's dense bf16 ``F.linear``, at 512
rows 0.7 times. The last line is JSON.

What kernels call is compiled first, as a server does while it is idle, and so is the product that
compiled decode steps make of the same weight (``compiled decode``, for 1 row); --enforce-eager
measures without both. The settings are those that the ``ingle`` command gives itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from compiled_product import compiled_product

from ingle.builtin.affine_cpu import ingle_matmul_kernels as affine_kernels
from ingle.cli.restart import restart_with_settings
from ingle.engine.background_compiler import BackgroundCompiler
from ingle.engine.function_compiler import FunctionCompiler
from ingle.model.huge_pages import HugePages
from ingle.plugin import AffineWeight, DeviceInfo, KernelUse, LinearWeight
from ingle.plugin.affine_packing import pack_bits
from ingle.plugin.cache_folder import default_cache_folder
from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes
from ingle_quant_exl2.plugin import ingle_matmul_kernels as exl2_kernels
from ingle_quant_exl2.weight import StoredExl2Weight

CPU = DeviceInfo(type="cpu")
TARGETS = {1: 3.0, 512: 0.7}


def affine(size: int, *, has_zeros: bool = True) -> AffineWeight:
    """4 bits, groups of 128, with zeros as AWQ has them, or without as symmetric GPTQ."""
    groups = size // 128
    zeros = torch.randint(0, 16, (groups, size), dtype=torch.uint8)
    return AffineWeight(
        bits=4,
        group_size=128,
        in_features=size,
        out_features=size,
        codes=pack_bits(torch.randint(0, 16, (size, size), dtype=torch.uint8), 4),
        scales=(torch.rand(groups, size) * 0.01 + 0.001).half(),
        zeros=zeros if has_zeros else None,
    )


def symmetric(size: int) -> AffineWeight:
    """4 bits, groups of 128, every zero 8."""
    return affine(size, has_zeros=False)


def exl2(size: int) -> StoredExl2Weight:
    """4 bits, groups of 128, in the order of the file."""
    groups = size // 128
    pairs = [value for group in range(groups) for value in (4, group * 16)]
    return StoredExl2Weight(
        in_features=size,
        out_features=size,
        stored_out_features=size,
        dtype=torch.bfloat16,
        layout=parse_layout("lin", pairs, size // 8, size),
        q_scale=pack_scale_codes(torch.randint(0, 16, (groups, size))),
        q_scale_max=torch.full((groups,), 0.1).half(),
        q_weight=pack_codes(torch.randint(0, 16, (size, size)), 4),
    )


Product = Callable[[torch.Tensor], object]


def packed_products(weight: LinearWeight, rows: int, *, compiled: bool) -> dict[str, Product]:
    """The product by the kernel that the engine would choose, and as compiled decode steps have it,
    by name."""
    use = KernelUse(device=CPU, dtype=torch.bfloat16, rows=range(rows, rows + 1))
    kernels = [*affine_kernels(CPU), *exl2_kernels(CPU)]
    kernel = max((k for k in kernels if k.supports(weight, use)), key=lambda k: k.priority)
    ready = HugePages().repacked(kernel.prepare(weight))
    functions = kernel.functions(ready) if compiled else ()
    if functions:
        BackgroundCompiler([FunctionCompiler(functions, default_cache_folder())]).compile_now()
    products: dict[str, Product] = {kernel.name: lambda x: kernel.matmul(x, ready)}
    decode = compiled_product(ready) if compiled and rows == 1 else None
    if decode is not None:
        products[f"{kernel.name}, compiled decode"] = decode
    return products


def seconds(product: Product, x: torch.Tensor, calls: int) -> float:
    """Of one call, over a few."""
    start = time.perf_counter()
    for _ in range(calls):
        product(x)
    return (time.perf_counter() - start) / calls


def in_turns(
    packed: Product, dense: Product, x: torch.Tensor, pairs: int, *, is_warm: bool
) -> list[tuple[float, float]]:
    """Seconds of both, pair by pair. As they follow on each other the first of a turn's calls finds
    its weight pushed out of the caches by the other's; ``is_warm``: that call is not timed."""
    calls = 20 if x.shape[0] == 1 else 1
    times = []
    for _ in range(pairs):
        found = []
        for product in (packed, dense):
            if is_warm:
                product(x)
            found.append(seconds(product, x, calls))
        times.append((found[0], found[1]))
    return times


def compare(
    weight: LinearWeight, rows: int, pairs: int, *, compiled: bool
) -> Iterator[dict[str, object]]:
    """Packed products, each in turns with the dense one."""
    size = weight.in_features
    matrix = torch.randn(size, size).to(torch.bfloat16)
    x = torch.randn(rows, size).to(torch.bfloat16)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, matrix)

    for name, packed in packed_products(weight, rows, compiled=compiled).items():
        in_turns(packed, dense, x, 2, is_warm=True)
        for is_warm in (False, True):
            times = in_turns(packed, dense, x, pairs, is_warm=is_warm)
            ratios = sorted(slow / quick for quick, slow in times)
            yield {
                "weight": type(weight).__name__ + (", no zeros" if _has_no_zeros(weight) else ""),
                "kernel": name,
                "rows": rows,
                "turns": "warm" if is_warm else "cold",
                "packed_ms": 1e3 * statistics.median(quick for quick, _ in times),
                "dense_ms": 1e3 * statistics.median(slow for _, slow in times),
                "ratio": statistics.median(ratios),
                "lowest": ratios[0],
                "highest": ratios[-1],
                "target": TARGETS.get(rows),
            }


def _has_no_zeros(weight: LinearWeight) -> bool:
    return isinstance(weight, AffineWeight) and weight.zeros is None


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="input and output features")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 512])
    parser.add_argument("--pairs", type=int, default=41, help="turns taken")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = []
    print(f"{arguments.size} x {arguments.size}, bf16, {torch.get_num_threads()} threads")
    print("| weight | kernel | rows | turns | packed, ms | dense, ms | as fast | pairs | target |")
    print("|---|---|---|---|---|---|---|---|---|")
    for make in (affine, symmetric, exl2):
        for rows in arguments.rows:
            weight = make(arguments.size)
            compiled = not arguments.enforce_eager
            for found in compare(weight, rows, arguments.pairs, compiled=compiled):
                results.append(found)
                print(
                    "| {weight} | {kernel} | {rows} | {turns} | {packed_ms:.2f} | {dense_ms:.2f} | "
                    "{ratio:.2f} | {lowest:.2f} to {highest:.2f} | {target} |".format(**found),
                    flush=True,
                )
    print(json.dumps(results))


if __name__ == "__main__":
    restart_with_settings(["bench"])
    with torch.inference_mode():
        main()
