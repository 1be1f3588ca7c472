"""A decoder whose segments run eagerly, uncompiled: what the compiler is given, put to the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from ingle.engine.model_runner import ModelRunner
from ingle.model.compiled_decoder import CompiledDecoder, Segments
from ingle.model.decoder import Decoder
from ingle.model.segment_cache import cache_sides
from ingle.model.segment_package import (
    CompiledSegment,
    example_state,
    example_weights,
    segment_module,
)
from ingle.model.segment_plan import segment_shapes, segment_weights
from ingle.model.segment_shape import Shape


class EagerSegment:
    """Stands in for a ``CompiledSegment`` of ``shape``."""

    def __init__(self, shape: Shape) -> None:
        self._module = segment_module(shape)
        self._example = (*example_state(shape), example_weights(shape))

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs the function on the tensors that a package takes in one list."""
        out = self._module(*_nested(self._example, iter(inputs)))
        return (out,) if isinstance(out, torch.Tensor) else out


def _nested(example: Any, feed: Iterator[torch.Tensor]) -> Any:
    """The tensors of ``feed`` in the nest of tuples that ``example`` is."""
    if isinstance(example, torch.Tensor):
        return next(feed)
    return tuple(_nested(one, feed) for one in example)


def eager_decoder(runner: ModelRunner, model: Decoder) -> CompiledDecoder:
    """``model``, whose cache ``runner`` has, with eager segments for single tokens."""
    sides = cache_sides(runner.caches)
    shapes = segment_shapes(model, runner.block_size, sides)
    assert shapes is not None
    entry, layers, last, head = (
        cast(CompiledSegment, EagerSegment(shape))
        for shape in (shapes.entry, shapes.layers, shapes.last, shapes.head)
    )
    segments = Segments(entry=entry, layers=layers, last=last, head=head)
    weights = segment_weights(model)
    return CompiledDecoder(model, shapes, segments, weights, in_place=sides is not None)
