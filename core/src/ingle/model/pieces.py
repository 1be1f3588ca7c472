"""What a model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass


def pieces(part: object) -> Iterator[object]:
    """Everything in a model or a part of one that is neither a dataclass nor a list or tuple: what
    those hold, at any depth, in order."""
    if isinstance(part, tuple | list):
        for item in part:
            yield from pieces(item)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from pieces(getattr(part, field.name))
    else:
        yield part
