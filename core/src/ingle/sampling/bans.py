"""Stages that bar tokens by name. ``logits`` float32 [V]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingle.sampling.stages import NEVER, History


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """``allowed_token_ids``: bars every other token."""

    token_ids: tuple[int, ...]

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        ids = list(self.token_ids)
        result = torch.full_like(logits, NEVER)
        result[ids] = logits[ids]
        return result


@dataclass(frozen=True, slots=True)
class BadWords:
    """``bad_words``: bars the last token of each sequence when the output ends with the tokens
    before it (transformers' ``NoBadWordsLogitsProcessor``)."""

    sequences: tuple[tuple[int, ...], ...]

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        output = history.output_token_ids
        for *head, last in self.sequences:
            if not head or list(output[-len(head) :]) == head:
                logits[last] = NEVER
        return logits
