"""Weights in huge pages: what a processor reads from end to end for every token.

With pages of 4 KiB a core waits at every page border for the translation of the next address, in a
virtual machine twice. With pages of 2 MiB the same loop over the demo model's matrices reads 34
instead of 26 GB/s (docs/benchmarks.md).
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from ingle.plugin.linear import LinearWeight

HUGE_PAGE_BYTES = 2 * 1024**2
CHUNK_BYTES = 128 * HUGE_PAGE_BYTES
"""Address space taken at a time. Pages that nothing is written to take no memory; of each chunk one
page is written to in part only, so small chunks would waste memory."""
ALIGNMENT = 64
"""A cache line: no two tensors share one."""


class HugePages:
    """Memory for tensors that live as long as the model. Where the system has no huge pages, or
    gives none away, it is ordinary memory."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` (on a CPU), contiguous, in huge pages."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes == 0:
            return tensor.contiguous()
        place = self._take(num_bytes).view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)

    def repacked(self, weight: LinearWeight) -> LinearWeight:
        """A weight with its tensors in host memory copied into huge pages."""
        tensors = dict(weight.tensors())
        for name, tensor in tensors.items():
            is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
            # Equal orders are one tensor, by which core knows that a gather serves several parts.
            if is_plain and tensor is not weight.input_order:
                tensors[name] = self.copy(tensor)
        return weight.with_tensors(tensors)

    def _take(self, num_bytes: int) -> torch.Tensor:
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > self._chunk.numel():
            self._chunk, start = _map(max(CHUNK_BYTES, num_bytes)), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used]


def _map(num_bytes: int) -> torch.Tensor:
    """uint8, at least ``num_bytes``, from a page border on."""
    size = (-(-num_bytes // HUGE_PAGE_BYTES) + 1) * HUGE_PAGE_BYTES
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    # Private: what processes could share is a file to the system, and those stay in small pages.
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that is built without them
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :]
