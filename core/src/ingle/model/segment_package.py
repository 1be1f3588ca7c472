"""Compiled decode segments on disk: built once per model shape and processor, loaded in
milliseconds.

The package is AOTInductor's ``.pt2``: torch's own ahead-of-time format. It holds machine code, so
it is only ever read from the user's own cache folder.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ingle.errors import ConfigError
from ingle.model import decode_segment
from ingle.model.decode_segment import DecodeSegment, SegmentShape, example_inputs

COMPILERS = ("g++", "clang++")
MAX_RELATIVE_ERROR = 1e-2
"""Between a compiled segment and the same function run eagerly, both summing in float32; the
outputs are rounded to 16 bits."""


class CompiledSegment:
    """A loaded package, called with ``DecodeSegment.forward``'s state and weights in one list."""

    def __init__(self, path: Path) -> None:
        self._loader: Any = _open_package(str(path))

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs it; ``inputs`` is emptied."""
        outputs: Sequence[torch.Tensor] = self._loader.boxed_run(inputs)
        return outputs


def _open_package(path: str) -> Any:
    """torch's runner of the package. Its C++ class opens it in 7 ms; the public function around it
    first imports the whole compiler, which takes seconds, so it is only what is left when a
    torch has no such class."""
    bindings = getattr(torch._C, "_aoti", None)
    runner = getattr(bindings, "AOTIModelPackageLoader", None)
    if runner is None:
        return torch._inductor.aoti_load_package(path).loader
    return runner(path, "model", False, 1, -1)


def package_path(folder: Path, shape: SegmentShape, dtype: torch.dtype) -> Path:
    """Where the package for this shape, processor and torch lies."""
    facts = (
        asdict(shape),
        str(dtype),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        inspect.getsource(decode_segment),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:20]
    return folder / "compiled" / f"decode-segment-{digest}.pt2"


def build_package(path: Path, shape: SegmentShape, dtype: torch.dtype) -> None:
    """Compiles the segment into ``path``; takes some twenty seconds and a C++ compiler.

    Raises:
        ConfigError: When there is no C++ compiler.
    """
    if not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            "compiling decode kernels needs a C++ compiler, and neither g++ nor clang++ is on "
            "PATH. Install one (apt install g++), or run without them: --enforce-eager."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    inputs = example_inputs(shape, dtype)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program = torch.export.export(DecodeSegment(shape), inputs)
        built = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(folder) / "segment.pt2"),
            # Sums may be reordered and contracted: that is what lets them use vector FMAs.
            inductor_configs={"cpp.enable_floating_point_contract_flag": "fast"},
        )
        os.replace(built, path)


def load_package(path: Path, shape: SegmentShape, dtype: torch.dtype) -> CompiledSegment | None:
    """The package at ``path``, or None when it is not there or not right on this machine."""
    if not path.is_file():
        return None
    try:
        segment = CompiledSegment(path)
        inputs = example_inputs(shape, dtype)
        found = segment([*inputs[0], *inputs[1]])
    except RuntimeError:
        return None
    with torch.inference_mode():
        wanted = DecodeSegment(shape)(*inputs)
    right = all(_close(one, other) for one, other in zip(found, wanted, strict=True))
    return segment if right else None


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    difference = torch.linalg.vector_norm(found.float() - wanted.float())
    return bool(difference <= MAX_RELATIVE_ERROR * torch.linalg.vector_norm(wanted.float()))


def command(path: Path, shape: SegmentShape, dtype: torch.dtype) -> list[str]:
    """A command that builds the package in a process of its own."""
    facts = {"shape": asdict(shape), "dtype": str(dtype).removeprefix("torch.")}
    threads = str(torch.get_num_threads())
    return [
        sys.executable,
        "-P",  # the folder it is started in may be a stranger's: nothing is imported from there
        "-m",
        "ingle.model.segment_package",
        str(path),
        json.dumps(facts),
        threads,
    ]


def _main(path: str, facts: str, threads: str) -> None:
    # Ends by an exception, so that the half-made package is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("given up"))
    torch.set_num_threads(int(threads))
    read = json.loads(facts)
    build_package(Path(path), SegmentShape(**read["shape"]), getattr(torch, read["dtype"]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
