"""A weight's one-row product as decode steps have it: its row function with constant sizes,
compiled with a segment's settings, and nothing around it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ingle.model.half_vectors import use_half_vectors
from ingle.model.huge_pages import HugePages
from ingle.model.segment_package import SETTINGS, CompiledSegment
from ingle.model.stack_buffers import use_stack_buffers
from ingle.plugin import LinearWeight, RowProduct


class _Product(torch.nn.Module):
    def __init__(self, product: RowProduct) -> None:
        super().__init__()
        self._function = product.function

    def forward(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return self._function(tensors, x[0].float()).to(x.dtype).unsqueeze(0)


def compiled_product(weight: LinearWeight) -> Callable[[torch.Tensor], object] | None:
    """``x`` bfloat16 [1, K] to [1, N]; None for a weight without such a function. Takes some ten
    seconds and a C++ compiler."""
    product = weight.row_product()
    if product is None:
        return None
    pages = HugePages()
    tensors: Sequence[torch.Tensor] = [pages.copy(one) for one in product.tensors()]
    x = torch.zeros(1, weight.in_features, dtype=torch.bfloat16)
    use_stack_buffers()
    use_half_vectors()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(_Product(product), (x, *tensors))
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(folder) / "product.pt2"),
            inductor_configs={**SETTINGS, "aot_inductor.allow_stack_allocation": True},
        )
        run = CompiledSegment(Path(path))
    return lambda x: run([x, *tensors])[0]
