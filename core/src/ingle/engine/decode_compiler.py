"""Compiled decode steps for a running engine: the job for ``BackgroundCompiler``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ingle.engine.model_runner import ModelRunner
from ingle.model.compiled_decoder import CompiledDecoder, Segments
from ingle.model.compiled_limits import MAX_EXTRA_BYTES
from ingle.model.decoder import Decoder
from ingle.model.segment_cache import cache_sides
from ingle.model.segment_package import command, load_package, package_path
from ingle.model.segment_plan import (
    SegmentShapes,
    extra_bytes,
    segment_shapes,
    segment_weights,
    tried_weights,
)
from ingle.model.segment_shape import Shape
from ingle.plugin.cache_folder import default_cache_folder
from ingle.plugin.compiled_function import CompiledFunction
from ingle.plugin.device import DeviceInfo


class DecodeCompiler:
    """The job of putting compiled segments under a runner.

    Args:
        runner: Runs ``model``.
        model: The decoder as it was loaded.
        shapes: What to compile for it.
        folder: Where packages are kept.
        functions: What the model's kernels call. Segments wait for them to be compiled: kernels
            of several rows need them where segments have weights rewritten.
        in_place: Whether ``shapes`` are of the cache as it is stored.
    """

    title = "decode kernels"

    def __init__(
        self,
        runner: ModelRunner,
        model: Decoder,
        shapes: SegmentShapes,
        folder: Path,
        functions: Sequence[CompiledFunction] = (),
        *,
        in_place: bool = True,
    ) -> None:
        self._functions = tuple(functions)
        self._runner = runner
        self._model = model
        self._shapes = shapes
        self._in_place = in_place
        self._wanted = tuple(
            (package_path(folder, shape), shape)
            for shape in (shapes.entry, shapes.layers, shapes.last, shapes.head)
        )
        self.folder = self._wanted[0][0].parent

    @property
    def is_compiled(self) -> bool:
        """Whether single-token steps run through compiled segments."""
        return isinstance(self._runner.model, CompiledDecoder)

    @property
    def num_missing(self) -> int:
        """Packages that are not on disk yet."""
        return len(self._missing_packages())

    def use_packages(self) -> bool:
        """Takes the packages on disk into use; False when one is missing or not right here."""
        if not all(path.is_file() for path, _ in self._wanted):
            return False
        if not all(function.is_compiled for function in self._functions):
            return False
        segments = self._segments()
        if segments is None:
            return False
        with self._runner.between_steps:
            weights = segment_weights(self._model)
            self._runner.model = CompiledDecoder(
                self._model, self._shapes, segments, weights, in_place=self._in_place
            )
        return True

    def _segments(self) -> Segments | None:
        """The packages, tried out with some of the model's weights."""
        tried = tried_weights(self._model, self._shapes)
        entry, layers, last, head = (
            load_package(path, shape, tensors)
            for (path, shape), tensors in zip(self._wanted, tried, strict=True)
        )
        if entry is None or layers is None or last is None or head is None:
            return None
        return Segments(entry=entry, layers=layers, last=last, head=head)

    def missing(self) -> list[str]:
        """A command that builds the packages that are not on disk; empty when all are."""
        wanted = self._missing_packages()
        return command(wanted) if wanted else []

    def _missing_packages(self) -> list[tuple[Path, Shape]]:
        return [(path, shape) for path, shape in self._wanted if not path.is_file()]


def decode_compiler(
    runner: ModelRunner,
    model: Decoder,
    device: DeviceInfo,
    functions: Sequence[CompiledFunction] = (),
) -> DecodeCompiler | None:
    """A compiler for a loaded model, its package in use when there is one on disk; None where
    there is nothing to gain: on a card, or for weights that segments do not know."""
    is_served = device.type == "cpu" and model.embedding.dtype is torch.bfloat16
    if not is_served:
        return None
    sides = cache_sides(runner.caches)
    shapes = segment_shapes(model, runner.block_size, sides)
    if shapes is None or extra_bytes(model) > MAX_EXTRA_BYTES:
        return None
    compiler = DecodeCompiler(
        runner, model, shapes, default_cache_folder(), functions, in_place=sides is not None
    )
    compiler.use_packages()
    return compiler
