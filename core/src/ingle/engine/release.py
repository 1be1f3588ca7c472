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
    release_free_pages()


def release_free_pages() -> None:
    """Gives pages back that hold nothing: glibc keeps freed ones until told. Takes milliseconds."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has no such call
        if trim is not None:
            trim(0)
