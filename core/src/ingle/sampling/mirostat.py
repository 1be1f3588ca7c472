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
    Preemption does not lose it: tokens computed again are not drawn again. A sequence that is sent
    back goes on with the limit it had there.
    """

    def __init__(self) -> None:
        self._mus: OrderedDict[str, list[float]] = OrderedDict()  # by number of tokens

    def limit(self, sequence_id: str, tau: float, history: History) -> SurpriseLimit:
        """The stage that truncates the sequence's next token."""
        place, mus = len(history.output_token_ids), self._mus.get(sequence_id, [])
        return SurpriseLimit(mus[place - 1] if 0 < place <= len(mus) else 2 * tau)

    def saw(self, sequence_id: str, place: int, mu: float) -> None:
        """Keeps the limit ``mu`` that follows from the output token ``place``."""
        mus = self._mus.setdefault(sequence_id, [])
        del mus[place:]
        mus.append(mu)
        self._mus.move_to_end(sequence_id)

    def trim(self, num_rows: int) -> None:
        """Drops the oldest, leaving enough for two batches."""
        while len(self._mus) > max(MIN_KEPT, 2 * num_rows):
            self._mus.popitem(last=False)


def surprise_bits(logits: torch.Tensor, token_id: int) -> float:
    """``-log2 p`` of a token under ``logits`` [V]."""
    return -float(logits.log_softmax(-1)[token_id]) / math.log(2)
