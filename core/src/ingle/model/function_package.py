"""Compiled functions of kernels on disk: built once per processor, loaded in milliseconds.

Like the segments of ``segment_package``, they are machine code, and only ever read from the user's
own cache folder.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ingle.model import half_vectors
from ingle.model.half_vectors import use_half_vectors
from ingle.model.segment_package import SETTINGS as WRITTEN_OUT
from ingle.model.segment_package import CompiledSegment, require_compiler
from ingle.plugin.compiled_function import MIN_SIZE, Compilable, Dimension, Runner

SETTINGS: Mapping[str, object] = {"cpp.dynamic_threads": True, "emulate_precision_casts": True}
"""Of the compiler: any number of threads, and results rounded wherever the operators round."""

INT_LIMIT = 100
"""Examples of integer arguments lie below it."""


class _Function(torch.nn.Module):
    """The function; a module only because ``torch.export`` wants one."""

    def __init__(self, source: Compilable) -> None:
        super().__init__()
        self.source = source

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Calls it; there is nothing to return, for the last tensor receives the result."""
        self.source.function(*tensors)
        return ()


def function_path(folder: Path, source: Compilable) -> Path:
    """Where the package for this function, processor and torch lies. It serves any number of
    threads."""
    module = import_module(source.name.partition(":")[0])
    facts = (
        source.name,
        sorted(_settings(source).items()),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        inspect.getsource(module),
        inspect.getsource(half_vectors),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:20]
    return folder / "compiled" / f"function-{digest}.pt2"


def build_function(path: Path, source: Compilable) -> None:
    """Compiles the function into ``path``; takes some ten seconds and a C++ compiler.

    Raises:
        ConfigError: When there is no C++ compiler.
    """
    require_compiler()
    use_half_vectors()
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {name: torch.export.Dim(name, min=MIN_SIZE) for name in source.usual}
    shapes = tuple(_dynamic(shape, names) for shape, _ in source.arguments)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program = torch.export.export(
            _Function(source), example_arguments(source), dynamic_shapes={"tensors": shapes}
        )
        built = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(folder) / "function.pt2"),
            inductor_configs=_settings(source),
        )
        os.replace(built, path)


def _settings(source: Compilable) -> dict[str, object]:
    return {**SETTINGS, **(WRITTEN_OUT if source.is_written_out else {})}


def _dynamic(shape: Sequence[Dimension], names: Mapping[str, Any]) -> dict[int, Any]:
    """What ``torch.export`` wants to know of an argument's dimensions."""
    found = {}
    for at, one in enumerate(shape):
        if isinstance(one, str):
            found[at] = names[one]
        elif isinstance(one, tuple):
            found[at] = one[0] * names[one[1]]
    return found


def load_function(path: Path, source: Compilable) -> Runner | None:
    """The package at ``path``, or None when it is not there, or does not give what the function
    does on this machine."""
    if not path.is_file():
        return None
    found, wanted = example_arguments(source), example_arguments(source)
    try:
        run = CompiledSegment(path)
        run(list(found))
    except RuntimeError:
        return None
    source.function(*wanted)
    return run if _is_right(found[-1], wanted[-1], source.max_relative_error) else None


def _is_right(found: torch.Tensor, wanted: torch.Tensor, max_error: float) -> bool:
    if not max_error:
        return torch.equal(found, wanted)
    typical = float(wanted.double().square().mean().sqrt())
    return torch.allclose(found.double(), wanted.double(), rtol=max_error, atol=max_error * typical)


def example_arguments(source: Compilable) -> tuple[torch.Tensor, ...]:
    """Random arguments of the usual sizes, the same every time; a result of zeros."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for shape, dtype in source.arguments:
        size = [_usual(one, source.usual) for one in shape]
        if dtype.is_floating_point:
            tensors.append(torch.randn(size, generator=generator).to(dtype))
        else:
            tensors.append(torch.randint(INT_LIMIT, size, generator=generator, dtype=dtype))
    tensors[-1].zero_()
    return tuple(tensors)


def _usual(dimension: Dimension, sizes: Mapping[str, int]) -> int:
    if isinstance(dimension, int):
        return dimension
    factor, name = (1, dimension) if isinstance(dimension, str) else dimension
    return factor * sizes[name]


def command(wanted: Sequence[tuple[Path, Compilable]]) -> list[str]:
    """A command that builds packages in a process of its own."""
    facts = [(str(path), source.name) for path, source in wanted]
    # -P: the folder it is started in may be a stranger's: nothing is imported from there
    return [sys.executable, "-P", "-m", "ingle.model.function_package", json.dumps(facts)]


def _find(name: str) -> Compilable:
    module, _, attribute = name.partition(":")
    found: Any = getattr(import_module(module), attribute)
    assert isinstance(found, Compilable)
    return found


def _main(facts: str) -> None:
    # Ends by an exception, so that the half-made package is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("given up"))
    for path, name in json.loads(facts):
        build_function(Path(path), _find(name))


if __name__ == "__main__":
    _main(*sys.argv[1:])
