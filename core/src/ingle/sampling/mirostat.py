"""Mirostat 2: a limit on surprise that is steered towards a target, token by token."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch

from ingle.sampling.stages import History
from ingle.sampling.truncation import SurpriseLimit

MIN_KEPT = 1024


class MirostatStates:
    """Each sequence's limit mu. It begins at ``2 * tau`` and after each token loses ``eta *
    (surprise - tau)``, where surprise is ``-log2 p`` before truncation (Basu et al. 2021).

    Kept here and not made anew from output tokens, which do not tell their probabilities.
    Preemption does not lose it: tokens computed again are not drawn again.
    """

    def __init__(self) -> None:
        self._mus: OrderedDict[str, float] = OrderedDict()

    def limit(self, sequence_id: str, tau: float, history: History) -> SurpriseLimit:
        """The stage that truncates the sequence's next token."""
        if not history.output_token_ids:
            self._mus.pop(sequence_id, None)
        return SurpriseLimit(self._mus.get(sequence_id, 2 * tau))

    def saw(self, sequence_id: str, mu: float, step: float) -> None:
        """Keeps the limit after a token: ``mu`` less ``eta * (surprise - tau)``."""
        self._mus[sequence_id] = mu - step
        self._mus.move_to_end(sequence_id)

    def trim(self, num_rows: int) -> None:
        """Drops the oldest, leaving enough for two batches."""
        while len(self._mus) > max(MIN_KEPT, 2 * num_rows):
            self._mus.popitem(last=False)


def surprise_bits(logits: torch.Tensor, token_id: int) -> float:
    """``-log2 p`` of a token under ``logits`` [V]."""
    return -float(logits.log_softmax(-1)[token_id]) / math.log(2)
