"""Functions of torch operators that core compiles ahead of time for the processor it runs on.

Until a function is compiled, and where there is no C++ compiler, it runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

MIN_SIZE = 2
"""The least size of a named dimension in compiled code: the compiler takes 1 for a constant."""

Dimension = int | str | tuple[int, str]

Runner = Callable[["list[torch.Tensor]"], object]
"""Compiled code: takes the function's arguments in a list, which it empties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilable:
    """What the compiler has to know of a function.

    Attributes:
        name: Where this very object lies, as ``module:name``: the compiler runs in a process of
            its own and imports it.
        function: Writes its result into the last of its arguments and returns nothing.
        arguments: Shape and dtype of each. A dimension is a number, a name for one that differs
            between calls, or a multiple of such a one: ``(64, "blocks")``.
        usual: A size for every name, typical of calls whose speed matters.
        max_relative_error: How far any element of the result may lie from the function's, relative
            to it or, of sums that cancel, to the root of all elements' mean square; 0 for functions
            whose bits do not depend on who computes them.
        is_written_out: Whether its sums are long expressions, term by term: the compiler is not to
            cut them into pieces, and may contract products and sums.
    """

    name: str
    function: Callable[..., None]
    arguments: tuple[tuple[tuple[Dimension, ...], torch.dtype], ...]
    usual: Mapping[str, int]
    max_relative_error: float = 0.0
    is_written_out: bool = False

    def sizes(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Sizes of the named dimensions of a call's arguments."""
        return [
            size
            for tensor, (shape, _) in zip(tensors, self.arguments, strict=True)
            for size, dimension in zip(tensor.shape, shape, strict=True)
            if isinstance(dimension, str)
        ]


class CompiledFunction:
    """Calls a function, compiled where core has done so.

    Attributes:
        source: The function.
    """

    def __init__(self, source: Compilable) -> None:
        self.source = source
        self._run: Runner | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether calls run compiled code."""
        return self._run is not None

    def use(self, run: Runner) -> None:
        """From now on calls run this code, which core has compared with the function."""
        self._run = run

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Calls it; the last tensor receives the result. All are contiguous."""
        if self._run is None or min(self.source.sizes(tensors)) < MIN_SIZE:
            self.source.function(*tensors)
        else:
            self._run(list(tensors))
