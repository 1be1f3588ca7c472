"""Measures how a loaded model's products are launched best: for ``ingle compile`` on a card."""

from __future__ import annotations

import torch

from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.model.linear import find_linears


def tune_linears(core: EngineCore, dtype: torch.dtype) -> list[str]:
    """What was found with activations of ``dtype``, a line for each kind of weight; weights of a
    kind are measured once.

    A weight's kind is its own kernel's affair: it names it in the line. Here weights of the same
    kernel, class, shapes and dtypes are of a kind.
    """
    runner = core.ahead.runner if core.ahead is not None else core.runner
    assert isinstance(runner, ModelRunner)
    seen: set[tuple[object, ...]] = set()
    lines: list[str] = []
    for part in (part for linear in find_linears(runner.model) for part in linear.parts):
        kernel, weight = part.kernels[0], part.weight
        shapes = tuple((name, t.dtype, *t.shape) for name, t in sorted(weight.tensors().items()))
        kind = (kernel.name, type(weight), shapes)
        if kind not in seen:
            seen.add(kind)
            lines += filter(None, [kernel.tune(weight, dtype)])
    return lines
