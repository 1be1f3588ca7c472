"""Joins a chunk's attention to itself with its attention to what was cached before it.

Shape letters: T rows, Q query heads, D head size.
"""

from __future__ import annotations

import torch

from ingle.plugin.compiled_function import Compilable


def joined(
    own: torch.Tensor,
    lse: torch.Tensor,
    before: torch.Tensor,
    lse_before: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The two by their shares, in float32.

    Args:
        own: [T, Q, D].
        lse: Its log-sum-exps (natural) float32 [Q, T].
        before: [T, Q, D].
        lse_before: float32 [Q, T].
        out: Takes the result, [T, Q, D].
    """
    share = torch.sigmoid(lse - lse_before).T.unsqueeze(-1)
    out.copy_(torch.lerp(before.float(), own.float(), share).to(out.dtype))


JOINED = Compilable(
    name=f"{__name__}:JOINED",
    function=joined,
    arguments=(
        (("rows", "heads", "size"), torch.bfloat16),
        (("heads", "rows"), torch.float32),
        (("rows", "heads", "size"), torch.bfloat16),
        (("heads", "rows"), torch.float32),
        (("rows", "heads", "size"), torch.bfloat16),
    ),
    usual={"rows": 500, "heads": 12, "size": 64},
    max_relative_error=2.0**-7,  # one step of bfloat16: exponentials of another library
)
