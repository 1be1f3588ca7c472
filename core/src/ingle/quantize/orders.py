"""Orders in which inputs are quantised: what comes first is rounded with the rest still free.

Shape letters: K input features, G groups.
"""

from __future__ import annotations

import torch


def by_activation(diagonal: torch.Tensor) -> torch.Tensor:
    """Inputs by their second moment, largest first: int64 [K]. Ties keep their order."""
    return torch.argsort(diagonal, descending=True, stable=True)


def within_groups(diagonal: torch.Tensor, group_size: int) -> torch.Tensor:
    """The same without taking a group apart: inputs sorted inside their natural group, groups by
    their largest: int64 [K]. Group-aware reordering; group indices stay sequential.

    A short last group stays last.
    """
    whole = len(diagonal) // group_size * group_size
    groups = diagonal[:whole].view(-1, group_size)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    outside = torch.argsort(groups.amax(1), descending=True, stable=True)
    starts = torch.arange(len(groups), device=diagonal.device) * group_size
    order = (inside + starts[:, None])[outside].flatten()
    rest = torch.argsort(diagonal[whole:], descending=True, stable=True) + whole
    return torch.cat((order, rest))
