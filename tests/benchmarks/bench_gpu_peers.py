"""What torch itself does with the same products, beside Ingle's kernels in ``bench_gpu.py``."""

from __future__ import annotations

import torch
from bench_gpu_timing import Bench, Row

GROUP = 128


def peers_section(bench: Bench, deadline: float) -> list[Row]:
    """One row times [N, K]: cuBLAS in bf16, and torch's own 4-bit product."""
    shapes = ((128, 256),) if bench.small else ((4096, 4096), (28672, 4096), (4096, 14336))
    rows: list[Row] = []
    for n, k in shapes:
        rows.append({"what": f"bf16 {n}x{k} M=1", **bench.rate(2 * n * k, _dense(bench, n, k))})
        nbytes = n * k // 2 + 4 * n * k // GROUP
        seconds = _int4pack(bench, n, k)
        rows.append({"what": f"int4pack {n}x{k} M=1", **bench.rate(nbytes, seconds)})
    return rows


def _row(bench: Bench, k: int) -> torch.Tensor:
    return torch.randn(1, k, device=bench.device).to(torch.bfloat16)


def _dense(bench: Bench, n: int, k: int) -> float:
    x = _row(bench, k)
    copies = [
        torch.randn(n, k, device=bench.device).to(torch.bfloat16)
        for _ in range(bench.copies(2 * n * k))
    ]
    return bench.seconds([lambda w=w: torch.nn.functional.linear(x, w) for w in copies])


def _int4pack(bench: Bench, n: int, k: int) -> float:
    x = _row(bench, k)
    scales = torch.rand(k // GROUP, n, 2, device=bench.device).to(torch.bfloat16)
    if bench.small:
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
    else:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=bench.device)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        product = torch.ops.aten._weight_int4pack_mm
    copies = [packed.clone() for _ in range(bench.copies(n * k // 2))]
    return bench.seconds([lambda w=w: product(x, w, GROUP, scales) for w in copies])
