"""Checks that Triton's interpreter lacks: stray addresses and programs that overwrite each other.

Loaded by ``triton_interpreter.install(check=...)``; see there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


class OutOfBoundsError(Exception):
    """A load, store or atomic left every tensor the kernel was given."""


class RaceError(Exception):
    """Two programs stored to the same address."""


class _Launch:
    """The memory one launch may touch, and who stored where.

    Attributes:
        starts, ends: uint64, byte ranges of the storages of all tensor arguments, sorted.
        writers: Program that first stored to an address; None: not recorded.
    """

    def __init__(self, arguments: Any, races: bool) -> None:
        storages = (tensor.untyped_storage() for tensor in _tensors(arguments))
        ranges = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        self.starts = np.array([start for start, _ in ranges], np.uint64)
        self.ends = np.array([end for _, end in ranges], np.uint64)
        self.writers: dict[int, Any] | None = {} if races else None

    def check(self, pointers: np.ndarray, size: int, what: str, program: Any) -> None:
        """Raises when one of ``pointers`` (``size`` bytes each) lies outside every storage."""
        index = np.searchsorted(self.starts, pointers, side="right") - 1
        bad = (index < 0) | (pointers + np.uint64(size) > self.ends[np.maximum(index, 0)])
        if not bad.any():
            return
        first = int(pointers[bad][0])
        nearest = int(np.argmin(np.abs(self.starts.astype(np.int64) - np.int64(first))))
        start, end = int(self.starts[nearest]), int(self.ends[nearest])
        raise OutOfBoundsError(
            f"{what} out of bounds in program {program}: {int(bad.sum())} of {pointers.size} "
            f"addresses; the first is {first - start:+d} bytes into a storage of {end - start}"
        )

    def record(self, pointers: np.ndarray, program: Any) -> None:
        """Notes plain stores; raises when another program has stored to one of them."""
        if self.writers is None:
            return
        for address in np.unique(pointers):
            writer = self.writers.setdefault(int(address), program)
            if writer != program:
                raise RaceError(f"programs {writer} and {program} store to the same address")


def _tensors(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _tensors(argument)
    elif isinstance(arguments, interpreter.TensorDescriptor):
        yield arguments.base
    elif hasattr(arguments, "data_ptr"):
        yield interpreter._unwrap_tensor(arguments)


class _Checker:
    """Replaces the builder's memory operations; knows the launch in progress."""

    def __init__(self, races: bool) -> None:
        self.races = races
        self.launch: _Launch | None = None

    def visit(self, builder: Any, pointers: Any, mask: Any, what: str) -> None:
        if self.launch is None:
            return
        mask = np.asarray(getattr(mask, "data", mask), bool)
        shape = np.broadcast_shapes(np.shape(pointers.data), mask.shape)
        used = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask, shape)]
        if used.size == 0:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self.launch.check(used, size, what, builder.grid_idx)
        if what == "store":
            self.launch.record(used, builder.grid_idx)


def install_checks(*, races: bool) -> None:
    """Checks every access of every launch from now on; ``races`` also records who stored where."""
    checker, builder = _Checker(races), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, modify = builder.create_atomic_cas, builder.create_atomic_rmw
    run = interpreter.GridExecutor.__call__

    def as_mask(mask: Any) -> Any:
        return interpreter.TensorHandle(getattr(mask, "data", mask), tl.int1)

    def checked_load(self: Any, ptrs: Any, mask: Any, *args: Any, **options: Any) -> Any:
        checker.visit(self, ptrs, mask, "load")
        return load(self, ptrs, as_mask(mask), *args, **options)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kw: Any) -> Any:
        checker.visit(self, ptrs, mask, "store")
        return store(self, ptrs, value, as_mask(mask), *args, **kw)

    def checked_swap(self: Any, ptr: Any, *args: Any) -> Any:
        checker.visit(self, ptr, True, "atomic")
        return swap(self, ptr, *args)

    def checked_modify(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any) -> Any:
        checker.visit(self, ptr, mask, "atomic")
        return modify(self, op, ptr, val, mask, *args)

    def checked_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, checker.launch = checker.launch, _Launch([args, list(kwargs.values())], races)
        try:
            return run(self, *args, **kwargs)
        finally:
            checker.launch = outer

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_cas, builder.create_atomic_rmw = checked_swap, checked_modify
    interpreter.GridExecutor.__call__ = checked_run
