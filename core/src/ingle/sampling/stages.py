"""Stages that change one row of logits before a token is drawn. Order is data: see ``sampler``.

Every stage works on ``logits`` float32 [V] of one request and returns the changed logits; a stage
that a request does not use is never built. V is the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a request has seen: token ids of its prompt and of its output so far."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class Stage(Protocol):
    """One change to a row of logits."""

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        """``logits`` float32 [V] to float32 [V]; may work in place."""
        ...


@dataclass(frozen=True, slots=True)
class BarTokens:
    """Bars tokens until ``min_tokens`` have been generated (end of sequence, stop tokens)."""

    token_ids: tuple[int, ...]
    min_tokens: int

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        if len(history.output_token_ids) < self.min_tokens:
            logits[list(self.token_ids)] = NEVER
        return logits


@dataclass(frozen=True, slots=True)
class LogitBias:
    """``logits[id] += bias`` (OpenAI's ``logit_bias``)."""

    biases: Mapping[int, float]

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        ids = torch.tensor(list(self.biases), dtype=torch.int64, device=logits.device)
        values = torch.tensor(list(self.biases.values()), device=logits.device)
        return logits.index_add_(0, ids, values.to(logits.dtype))


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Logits of tokens seen in prompt or output: divided by the penalty when positive, multiplied
    when negative (Keskar et al. 2019, CTRL). ``repetition_penalty_range`` n looks at the last n
    tokens alone; 0 at all."""

    penalty: float
    num_tokens: int = 0

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        seen = set(self._looked_at(history))
        ids = torch.tensor(sorted(seen), dtype=torch.int64, device=logits.device)
        values = logits[ids]
        logits[ids] = torch.where(values > 0, values / self.penalty, values * self.penalty)
        return logits

    def _looked_at(self, history: History) -> Sequence[int]:
        prompt, output = history.prompt_token_ids, history.output_token_ids
        from_prompt = self.num_tokens - len(output)
        if not self.num_tokens:
            return [*prompt, *output]
        return [*prompt[max(0, len(prompt) - max(0, from_prompt)) :], *output[-self.num_tokens :]]


@dataclass(frozen=True, slots=True)
class CountPenalties:
    """``logits[id] -= frequency * count + presence * (count > 0)`` over generated tokens
    (OpenAI's ``frequency_penalty`` and ``presence_penalty``)."""

    presence: float
    frequency: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        if not history.output_token_ids:
            return logits
        generated = torch.tensor(history.output_token_ids, device=logits.device)
        ids, counts = torch.unique(generated, return_counts=True)
        logits[ids] -= self.frequency * counts + self.presence
        return logits


@dataclass(frozen=True, slots=True)
class Temperature:
    """``logits / temperature``."""

    temperature: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        return logits.div_(self.temperature)


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the k largest logits; ties with the k-th stay."""

    k: int

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        if self.k >= logits.shape[0]:
            return logits
        kth = logits.topk(self.k).values[-1]
        return logits.masked_fill_(logits < kth, NEVER)


@dataclass(frozen=True, slots=True)
class TopP:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (Holtzman et al.
    2019); the token that crosses p is kept."""

    p: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        probabilities = logits.softmax(-1)
        count, size = 256, logits.shape[0]
        # Sorting a whole vocabulary costs milliseconds and the nucleus is nearly always small.
        while True:
            count = min(count, size)
            top, ids = probabilities.topk(count)
            before = top.cumsum(0) - top
            if count == size or float(before[-1] + top[-1]) >= self.p:
                break
            count *= 16
        kept = ids[(before < self.p) | (torch.arange(count, device=ids.device) == 0)]
        result = torch.full_like(logits, NEVER)
        result[kept] = logits[kept]
        return result


@dataclass(frozen=True, slots=True)
class MinP:
    """Keeps tokens with at least ``min_p`` times the likeliest one's probability (Nguyen et al.
    2024)."""

    min_p: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill_(probabilities < self.min_p * probabilities.max(), NEVER)
