"""Gives memory of what is no longer used back to the system, not only to the allocators."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Collects what is unreachable and empties the allocators' pools: host and card.

    For the moment after an engine was shut down and forgotten; takes up to a tenth of a second.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        # glibc keeps freed pages for itself until told (musl has no such call).
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
