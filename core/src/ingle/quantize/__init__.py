"""Making quants, and measuring what they cost: ``quantize`` and ``evaluation.evaluate``.

Format plugins may import the mathematics from here: ``hessian``, ``orders``, ``error_feedback``.
Importing the package itself loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingle.quantize.command import Quantized, quantize

__all__ = ["Quantized", "quantize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ingle.quantize' has no attribute {name!r}")
    from ingle.quantize import command

    return getattr(command, name)
