"""The loop over inputs that rounds one column at a time and lets the rest make up for it.

Shape letters: N output features, K input features.
Source: "GPTQ" (Frantar et al. 2022), algorithm 1 with lazy updates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RoundColumn = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``round_column(k, column, weight)`` gives the value of the grid nearest to ``column`` [N].
``weight`` [N, K] is where groups take their range from: in it columns before the current run of
``lazy`` are done, and later ones have had the errors of earlier runs, not yet of this one."""


def feed_errors_forward(
    weight: torch.Tensor, factor: torch.Tensor, round_column: RoundColumn, lazy: int = 128
) -> torch.Tensor:
    """Rounds every column in order; gives the rounded weight, float32 [N, K].

    Args:
        weight: float32 [N, K], in the order of quantising; left as it is.
        factor: Upper [K, K] of ``inverse_factor``, in the same order.
        round_column: Rounds one column.
        lazy: Columns after which the rest of the matrix learns of the errors.
    """
    weight = weight.clone()
    rounded = torch.empty_like(weight)
    num_inputs = weight.shape[1]
    for start in range(0, num_inputs, lazy):
        stop = min(start + lazy, num_inputs)
        # Columns as rows: a column of the weight is N scattered numbers otherwise.
        run = weight[:, start:stop].T.contiguous()
        errors = torch.empty_like(run)
        local = factor[start:stop, start:stop]
        for i in range(stop - start):
            value = round_column(start + i, run[i], weight)
            rounded[:, start + i] = value
            errors[i] = (run[i] - value) / local[i, i]
            if i + 1 < stop - start:
                run[i + 1 :].addr_(local[i, i + 1 :], errors[i], alpha=-1.0)
        weight[:, stop:].addmm_(errors.T, factor[start:stop, stop:], alpha=-1.0)
    return rounded
