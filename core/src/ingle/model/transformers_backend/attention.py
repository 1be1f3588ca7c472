"""Where transformers' modelling code calls for attention, and whom it reaches there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface

from ingle.errors import CheckpointError

NAME: Final = "ingle"
"""Under which transformers knows Ingle's attention."""
_SLOT: Final = "ingle_slot"
"""Attribute of attention modules that leads to the step that is running."""


class Step(Protocol):
    """One forward pass, as the attention sees it."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """``query`` [1, Q, T, D], ``key`` and ``value`` [1, H, T, D] to [1, T, Q, D]."""
        ...


class Slot:
    """Holds a model's step while it runs: not all of transformers' models hand arguments on to
    their attention, so the step cannot be one. Each model has a slot of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.step: Step | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self)

    @contextmanager
    def holding(self, step: Step) -> Iterator[None]:
        """``step`` is the one that runs."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Raises:
        CheckpointError: When the module is none of a served model's, or brings a mask of its own.
    """
    slot: Slot | None = getattr(module, _SLOT, None)
    step = None if slot is None else slot.step
    if step is None:
        raise CheckpointError(f"{type(module).__name__} of transformers is no attention layer")
    if attention_mask is not None:
        raise CheckpointError(f"{type(module).__name__} of transformers brings a mask of its own")
    return step.attend(module, query, key, value, options), None


def register() -> None:
    """Makes Ingle's attention known to transformers."""
    AttentionInterface.register(NAME, attend)
