"""Measures how a loaded model's products are launched best: for ``ingle compile`` on a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.model.linear import Linear


def tune_linears(core: EngineCore) -> list[str]:
    """What was found, a line for each kind of weight; weights of a kind are measured once.

    A weight's kind is its own kernel's affair: it names it in the line. Here weights of the same
    kernel, class, shapes and dtypes are of a kind.
    """
    runner = core.ahead.runner if core.ahead is not None else core.runner
    assert isinstance(runner, ModelRunner)
    seen: set[tuple[object, ...]] = set()
    lines: list[str] = []
    for part in (part for linear in linears_of(runner.model) for part in linear.parts):
        kernel, weight = part.kernels[0], part.weight
        shapes = tuple((name, t.dtype, *t.shape) for name, t in sorted(weight.tensors().items()))
        kind = (kernel.name, type(weight), shapes)
        if kind not in seen:
            seen.add(kind)
            lines += filter(None, [kernel.tune(weight)])
    return lines


def linears_of(part: Any) -> Iterator[Linear]:
    """The linears of a model or of a part of one, which is made of dataclasses and tuples."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from linears_of(inner)
    elif is_dataclass(part) and not isinstance(part, type):
        for entry in fields(part):
            yield from linears_of(getattr(part, entry.name))
