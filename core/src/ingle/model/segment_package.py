"""Compiled decode segments on disk: built once per model shape and processor, loaded in
milliseconds.

A package is AOTInductor's ``.pt2``: torch's own ahead-of-time format. It holds machine code, so it
is only ever read from the user's own cache folder.
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
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ingle.errors import ConfigError
from ingle.model import decode_segment, half_vectors, stack_buffers
from ingle.model.decode_segment import MIN_LENGTH, DecodeEntry, DecodeHead, DecodeSegment
from ingle.model.half_vectors import use_half_vectors
from ingle.model.segment_shape import (
    EntryShape,
    HeadShape,
    LayerShape,
    LinearShape,
    SegmentShape,
    Shape,
    SideShape,
    as_json,
    read_shape,
    row_functions,
)
from ingle.model.stack_buffers import use_stack_buffers

COMPILERS = ("g++", "clang++")
MAX_RELATIVE_ERROR = 1e-2
"""Between a compiled layer and the same function run eagerly, both summing in float32; the outputs
are rounded to 16 bits. Roundings of several layers add up as their root."""
SETTINGS: Mapping[str, object] = {
    # Sums may be reordered and contracted: that is what lets them use vector FMAs.
    "cpp.enable_floating_point_contract_flag": "fast",
    # Sums that are written out are not cut into pieces with memory in between.
    "realize_reads_threshold": 1000,
    "realize_acc_reads_threshold": 1000,
    "realize_opcount_threshold": 100_000,
}
"""Of torch's compiler."""
EXAMPLE_BLOCKS = 40
"""The compiler takes it for the usual length: with few tokens it leaves attention to one thread."""
EXAMPLE_START = 3

Weights = tuple[torch.Tensor, ...]
Arguments = tuple[Any, ...]
"""``forward``'s arguments: tensors and tuples of tensors."""


class CompiledSegment:
    """A loaded package, called with ``forward``'s tensors in one list."""

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


def package_path(folder: Path, shape: Shape) -> Path:
    """Where the package for this shape, processor and torch lies."""
    modules = {name.partition(":")[0] for name in row_functions(shape)}
    facts = (
        as_json(shape),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        inspect.getsource(decode_segment),
        (*SETTINGS.items(), *map(inspect.getsource, (stack_buffers, half_vectors))),
        *(inspect.getsource(import_module(name)) for name in sorted(modules)),
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:20]
    return folder / "compiled" / f"decode-{digest}.pt2"


def build_package(path: Path, shape: Shape) -> None:
    """Compiles the segment into ``path``; takes a C++ compiler and some ten seconds, for several
    layers up to a minute.

    Raises:
        ConfigError: When there is no C++ compiler.
    """
    require_compiler()
    use_stack_buffers()
    use_half_vectors()
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = (*example_state(shape), example_weights(shape))
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        program = torch.export.export(
            segment_module(shape), arguments, dynamic_shapes=_dynamic(shape, arguments)
        )
        built = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(folder) / "segment.pt2"),
            inductor_configs={
                **SETTINGS,
                # A result in an array lies in memory that the next call writes into, and logits
                # are read after it.
                "aot_inductor.allow_stack_allocation": not isinstance(shape, HeadShape),
            },
        )
        os.replace(built, path)


def require_compiler() -> None:
    """Raises ``ConfigError`` when there is no C++ compiler."""
    if not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            "compiling decode kernels needs a C++ compiler, and neither g++ nor clang++ is on "
            "PATH. Install one (apt install g++), or run without them: --enforce-eager."
        )


def segment_module(shape: Shape) -> torch.nn.Module:
    """The function to compile; it takes ``example_state``'s arguments and ``example_weights``."""
    if isinstance(shape, SegmentShape):
        return DecodeSegment(shape)
    return DecodeHead(shape) if isinstance(shape, HeadShape) else DecodeEntry(shape)


def _dynamic(shape: Shape, arguments: Arguments) -> Any:
    """Which dimensions differ between calls: slots of the cache, and where a sequence lies."""
    if not isinstance(shape, SegmentShape):
        return _constant(arguments)
    names = ("stored", "blocks", "before", "tokens")
    stored, blocks, before, tokens = (torch.export.Dim(n, min=MIN_LENGTH) for n in names)
    state, layers, _, weights = arguments
    in_slots = tuple(
        (*(tuple({1: stored} for _ in side) for side in layer[:2]), *_constant(layer[2:]))
        for layer in layers
    )
    place = ({0: blocks}, {0: before}, {0: tokens})
    return (_constant(state), in_slots, place, _constant(weights))


def _constant(arguments: Any) -> Any:
    """The same nest of tuples with None for every tensor."""
    return None if isinstance(arguments, torch.Tensor) else tuple(map(_constant, arguments))


def load_package(path: Path, shape: Shape, weights: Arguments) -> CompiledSegment | None:
    """The package at ``path``, or None when it is not there or not right on this machine.

    ``weights`` are those of some of the model's layers (or its head): it is tried out with them.
    """
    if not path.is_file():
        return None
    arguments = example_state(shape)
    try:
        segment = CompiledSegment(path)
        found = segment([*flat(arguments), *flat(weights)])
    except RuntimeError:
        return None
    arguments = example_state(shape)
    with torch.inference_mode():
        wanted = segment_module(shape)(*arguments, weights)
    expected = [wanted] if isinstance(wanted, torch.Tensor) else wanted
    layers = len(shape.layers) if isinstance(shape, SegmentShape) else 1
    allowed = MAX_RELATIVE_ERROR * layers**0.5
    errors = (_error(one, other) for one, other in zip(found, expected, strict=True))
    return segment if all(error <= allowed for error in errors) else None


def flat(arguments: Any) -> list[torch.Tensor]:
    """The tensors of a nest of tuples or lists, in order."""
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    return [tensor for one in arguments for tensor in flat(one)]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, relative to that of ``wanted``."""
    difference = torch.linalg.vector_norm(found.float() - wanted.float())
    return float(difference / torch.linalg.vector_norm(wanted.float()))


def example_state(shape: Shape) -> Arguments:
    """Everything but the weights, small and random, the same every time."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(torch.bfloat16)

    if isinstance(shape, HeadShape):
        return (draw(shape.lm_head.in_features),)
    if isinstance(shape, EntryShape):
        dim = shape.head_dim
        return (draw(shape.qkv_proj.in_features), draw(dim), draw(dim))
    first = shape.layers[0]
    heads, dim = first.num_kv_heads, first.head_dim
    state = (
        draw(first.num_heads + heads, dim),
        draw(heads, dim),
        draw(first.hidden_size).float(),
        draw(dim),
        draw(dim),
    )
    blocks = torch.arange(EXAMPLE_BLOCKS).flip(0)
    length = EXAMPLE_BLOCKS * first.block_size - EXAMPLE_START - 1
    stored = tuple(_example_stored(layer, generator) for layer in shape.layers)
    return state, stored, (blocks, *place(EXAMPLE_START, length))


def _example_stored(shape: LayerShape, generator: torch.Generator) -> Arguments:
    """A layer's ``Stored``, random."""
    slots = (shape.num_kv_heads, EXAMPLE_BLOCKS + 1, shape.block_size)
    sides = shape.k_side, shape.v_side
    tensors = (_example_side(side, slots, generator) for side in sides)
    constants = (
        tuple(_example_constant(size, dtype, generator) for size, dtype in side.constants)
        for side in sides
    )
    return (*tensors, *constants)


def _example_side(side: SideShape, slots: tuple[int, ...], generator: torch.Generator) -> Weights:
    """Keys or values of about the size of real ones: were they much larger, attention would be a
    choice of one token, and several layers of that tell roundings from errors no more."""
    kinds = [getattr(torch, dtype) for _, dtype in side.tensors]
    has_codes = not all(kind.is_floating_point for kind in kinds)
    drawn: list[torch.Tensor] = []
    for (rest, _), kind in zip(side.tensors, kinds, strict=True):
        numbers = torch.randn((*slots, *rest), generator=generator)
        if not kind.is_floating_point:
            numbers = (numbers * 16).clamp(0, 100)
        elif has_codes:  # the codes' scale
            numbers = numbers.abs() * 0.2
        drawn.append(numbers.to(kind))
    return tuple(drawn)


def _example_constant(
    size: tuple[int, ...], dtype: str, generator: torch.Generator
) -> torch.Tensor:
    """A rotation where the shape is one's, else a scale between a half and one and a half."""
    kind: torch.dtype = getattr(torch, dtype)
    if len(size) == 2 and size[0] == size[1]:
        rotation: torch.Tensor = torch.linalg.qr(torch.randn(size, generator=generator)).Q
        return rotation.to(kind).contiguous()
    return (torch.rand(size, generator=generator) + 0.5).to(kind)


def place(start: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a sequence lies in its blocks, as ``DecodeSegment`` takes it: a start and a length,
    told by the lengths of two tensors of one element each."""
    one = torch.zeros(1)
    return one.expand(start + MIN_LENGTH), one.expand(num_tokens)


def example_weights(shape: Shape) -> Arguments:
    """Tensors of the shapes and dtypes of a segment's weights, all zero."""

    def linear(one: LinearShape) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for part in one.parts:
            if part.scale_dtype:
                scale = getattr(torch, part.scale_dtype)
                tensors.append(torch.zeros(part.in_features, dtype=scale))
            if part.is_ordered:
                tensors.append(torch.zeros(part.in_features, dtype=torch.int64))
            tensors += [torch.zeros(d, dtype=getattr(torch, name)) for d, name in part.tensors]
        return [*tensors, half(one.out_features)] if one.has_bias else tensors

    def half(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    def entry(one: EntryShape) -> list[torch.Tensor]:
        head_norms = [half(one.head_dim) for _ in range(2 * one.has_head_norms)]
        return [half(one.qkv_proj.in_features), *linear(one.qkv_proj), *head_norms]

    def layer(one: LayerShape) -> Arguments:
        weights = [*linear(one.o_proj), half(one.hidden_size)]
        weights += [*linear(one.gate_up_proj), *linear(one.down_proj)]
        return tuple(weights if one.following is None else [*weights, *entry(one.following)])

    if isinstance(shape, HeadShape):
        return (half(shape.lm_head.in_features), *linear(shape.lm_head))
    if isinstance(shape, EntryShape):
        return tuple(entry(shape))
    return tuple(layer(one) for one in shape.layers)


def command(wanted: Sequence[tuple[Path, Shape]]) -> list[str]:
    """A command that builds packages in a process of its own."""
    facts = [(str(path), as_json(shape)) for path, shape in wanted]
    return [
        sys.executable,
        "-P",  # the folder it is started in may be a stranger's: nothing is imported from there
        "-m",
        "ingle.model.segment_package",
        json.dumps(facts),
        str(torch.get_num_threads()),
    ]


def _main(facts: str, threads: str) -> None:
    # Ends by an exception, so that the half-made package is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("given up"))
    torch.set_num_threads(int(threads))
    for path, shape in json.loads(facts):
        build_package(Path(path), read_shape(shape))


if __name__ == "__main__":
    _main(*sys.argv[1:])
