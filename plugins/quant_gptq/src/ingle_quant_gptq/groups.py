"""Which group each input of a GPTQ layer belongs to, whatever the file says about act-order.

Shape letters: K input features, G groups.
"""

from __future__ import annotations

import torch

from ingle.plugin import CheckpointError


def means_sequence(g_idx: torch.Tensor, num_groups: int) -> bool:
    """Whether a group index ([K]) says nothing: all zero although there are several groups.

    Groups then lie in sequence, as without an index (exllama issue 44, neural-compressor issue
    2204). Flags such as ``desc_act`` are wrong often enough not to be asked.
    """
    return num_groups > 1 and not bool(g_idx.any())


def checked_group_ids(g_idx: torch.Tensor, num_groups: int, name: str) -> torch.Tensor:
    """A stored group index as int64 [K]. Raises ``CheckpointError`` when it leaves the groups."""
    ids = g_idx.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_groups:
        raise CheckpointError(
            f"tensor {name} names groups {low} to {high}, but there are {num_groups} rows of "
            "scales; the file is damaged"
        )
    return ids
