"""Compiled functions of the kernels in use: the job for ``BackgroundCompiler``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingle.model.function_package import command, function_path, load_function
from ingle.plugin.compiled_function import Compilable, CompiledFunction


class FunctionCompiler:
    """The job of compiling what kernels call.

    Args:
        functions: Of all kernels; several may have the same source.
        folder: Where packages are kept.
    """

    title = "prompt kernels"

    def __init__(self, functions: Sequence[CompiledFunction], folder: Path) -> None:
        self._functions = tuple(functions)
        self._wanted = {
            source.name: (function_path(folder, source), source)
            for source in (one.source for one in functions)
        }
        self.folder = next(iter(self._wanted.values()))[0].parent

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code is in use."""
        return all(one.is_compiled for one in self._functions)

    @property
    def num_missing(self) -> int:
        """Packages that are not on disk yet."""
        return len(self._missing_packages())

    def use_packages(self) -> bool:
        """Takes the packages on disk into use; False when one is missing or not right here."""
        for path, source in self._wanted.values():
            run = load_function(path, source)
            if run is None:
                return False
            for one in self._functions:
                if one.source.name == source.name:
                    one.use(run)
        return True

    def missing(self) -> list[str]:
        """A command that builds the packages that are not on disk; empty when all are."""
        wanted = self._missing_packages()
        return command(wanted) if wanted else []

    def _missing_packages(self) -> list[tuple[Path, Compilable]]:
        return [(path, source) for path, source in self._wanted.values() if not path.is_file()]
