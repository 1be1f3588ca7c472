"""A buffer for results that live until the next call: new memory costs a CPU more than decoding
into it, because the system must find and clear every page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ReusedBuffer:
    """Gives tensors over the same memory for as long as nobody else holds on to it."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of that shape with any contents. It shares memory with an earlier one only when
        that one and all its views are gone. On CUDA, whose allocator reuses memory itself, always
        a new one."""
        import torch

        size = math.prod(shape)
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        kept = self._memory
        if kept is None or kept.dtype != dtype or kept.numel() < size or _is_shared(kept):
            # A quarter more, so that a growing sequence does not ask at every token.
            self._memory = kept = torch.empty(size + size // 4, dtype=dtype)
        return kept[:size].view(shape)


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether anything but ``tensor`` uses its memory; yes where torch does not tell."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    storage = tensor.untyped_storage()
    return bool(count(storage._cdata) > 2)  # the tensor and the handle just made
