"""Keys and values in 8-bit floating point for Ingle."""

from __future__ import annotations

__version__ = "0.1.0"
