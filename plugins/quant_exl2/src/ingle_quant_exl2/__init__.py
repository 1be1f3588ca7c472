"""EXL2 weights for Ingle: detection, loading, unpacking and kernels."""

from __future__ import annotations

__version__ = "0.1.0"
