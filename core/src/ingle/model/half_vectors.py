"""Sixteen half-precision numbers are loaded and stored as they are, in the process that compiles.

Next to float32, torch's compiler works on half a vector of bfloat16 or float16, and loads and
stores it as a whole one under a mask. On AMD's Zen 5 that takes three times as long as half a
vector (measured in docs/benchmarks.md). There is no public setting, so what is changed is private
to torch 2.13; a torch that does not know the names keeps its own ways.
"""

from __future__ import annotations

import re
from typing import Any, Final

LOAD: Final = re.compile(
    r"at::vec::Vectorized<(at::BFloat16|at::Half)>::loadu\((.*), static_cast<int64_t>\(16\)\)"
)
STORE: Final = re.compile(r"(\w+)\.store\((.*), static_cast<int64_t>\(16\)\);")
HALVES: Final = ("torch.bfloat16", "torch.float16")


def use_half_vectors() -> None:
    """Changes it for whatever this process compiles from now on, with AVX-512."""
    import torch
    from torch._inductor.codegen.cpp import CppVecKernel

    kernel: Any = CppVecKernel
    load = getattr(kernel, "_get_vec_load_line", None)
    store = getattr(kernel, "_get_store_line", None)
    if load is None or store is None or load.__module__ == __name__:  # done before
        return
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return

    def _get_vec_load_line(self: Any, *args: Any, **kwargs: Any) -> Any:
        return load_line(load(self, *args, **kwargs))

    def _get_store_line(
        self: Any, value: Any, var: Any, index: Any, dtype: Any, *args: Any, **kwargs: Any
    ) -> Any:
        code = store(self, value, var, index, dtype, *args, **kwargs)
        if str(dtype) in HALVES:
            code._lines = [store_line(line) for line in code._lines]
        return code

    kernel._get_vec_load_line = _get_vec_load_line
    kernel._get_store_line = _get_store_line


def load_line(line: str) -> str:
    """The C++ expression ``line``, without the mask if it loads 16 half-precision numbers."""
    found = LOAD.fullmatch(line)
    if not found:
        return line
    dtype, address = found.groups()
    vector = f"_mm256_loadu_si256(reinterpret_cast<const __m256i*>({address}))"
    return f"at::vec::Vectorized<{dtype}>(_mm512_castsi256_si512({vector}))"


def store_line(line: Any) -> Any:
    """The C++ statement ``line``, without the mask if it stores 16 half-precision numbers."""
    found = STORE.fullmatch(line) if isinstance(line, str) else None
    if not found:
        return line
    value, address = found.groups()
    vector = f"_mm512_castsi512_si256(static_cast<__m512i>({value}))"
    return f"_mm256_storeu_si256(reinterpret_cast<__m256i*>({address}), {vector});"
