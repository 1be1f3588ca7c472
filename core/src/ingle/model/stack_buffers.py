"""Buffers of compiled segments as arrays on the stack, in the process that compiles.

As tensors they cost more to make than a small layer's arithmetic. torch's compiler has no public
settings for it, so what is changed is private to torch 2.13; a torch that does not know the names
keeps its own ways, and segments are slower.
"""

from __future__ import annotations

from typing import Any

MAX_BYTES = 1 << 20
"""Of a segment's buffers together; torch's own bound is 100 KB. A thread's stack has 8 MiB."""
LINE_BYTES = 64
"""Of a cache line, where buffers begin: elsewhere every vector that is read touches two lines."""


def use_stack_buffers() -> None:
    """Sets both bounds for whatever this process compiles from now on."""
    from torch._inductor.codegen import cpp_wrapper_cpu_array_ref as codegen

    codegen.MAX_STACK_ALLOCATION_SIZE = MAX_BYTES
    wrapper: Any = getattr(codegen, "CppWrapperCpuArrayRef", None)
    allocate = getattr(wrapper, "make_allocation", None)
    if allocate is None or allocate.__module__ == __name__:  # done before
        return

    def make_allocation(self: Any, *args: Any, **kwargs: Any) -> Any:
        lines = self.wrapper_call._lines
        first = len(lines)
        found = allocate(self, *args, **kwargs)
        for at in range(first, len(lines)):
            if isinstance(lines[at], str) and "_storage[" in lines[at]:
                lines[at] = f"alignas({LINE_BYTES}) {lines[at]}"
        return found

    wrapper.make_allocation = make_allocation
