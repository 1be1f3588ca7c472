"""Stages that drop unlikely tokens by other rules than top-k, top-p and min-p.

``logits`` float32 [V]; what is barred already (minus infinity) stays so. The likeliest token always
stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ingle.sampling.stages import NEVER, History

CUTOFF_UNIT = 1e-4
"""``eta_cutoff`` and ``epsilon_cutoff`` are given in ten-thousandths, as KoboldAI does."""


def _drop(logits: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """``logits`` without the tokens of the mask ``dropped`` [V], the likeliest one excepted."""
    dropped[logits.argmax()] = False
    return logits.masked_fill_(dropped, NEVER)


def _information(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities [V], their logarithms [V] and the entropy in nats []."""
    logs = logits.log_softmax(-1)
    probabilities = logs.exp()
    return probabilities, logs, -(probabilities * logs).nansum()


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """``nsigma``: keeps logits of at least ``max - n * sigma``, sigma being the standard deviation
    of all logits (Tang et al. 2024, Top-n-sigma)."""

    n: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        sigma = logits[torch.isfinite(logits)].std(correction=0)
        return _drop(logits, logits < logits.max() - self.n * sigma)


@dataclass(frozen=True, slots=True)
class TopA:
    """``top_a``: keeps tokens with ``p >= top_a * p_max ** 2`` (KoboldAI)."""

    top_a: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        probabilities = logits.softmax(-1)
        return _drop(logits, probabilities < self.top_a * probabilities.max() ** 2)


@dataclass(frozen=True, slots=True)
class TailFree:
    """``tfs``: sorts probabilities downwards, takes the absolute second differences as shares of
    their sum, and drops the tail after the shares' cumulated sum exceeds ``z`` (Phénix and Egan
    2019). Share i belongs to token i + 1, as in Aphrodite."""

    z: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        if logits.shape[0] < 3:
            return logits
        probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
        curvature = probabilities.diff().diff().abs()
        over = (curvature / curvature.sum().clamp_min(1e-30)).cumsum(0) > self.z
        ends = torch.tensor([False, True], device=logits.device)
        dropped = torch.empty_like(order, dtype=torch.bool)
        dropped[order] = torch.cat([ends[:1], over, ends[1:]])
        return _drop(logits, dropped)


@dataclass(frozen=True, slots=True)
class EtaCutoff:
    """``eta_cutoff``: drops tokens with ``p < min(eta, sqrt(eta) * exp(-entropy))`` (Hewitt et al.
    2022)."""

    eta: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        eta = self.eta * CUTOFF_UNIT
        probabilities, _, entropy = _information(logits)
        limit = min(eta, math.sqrt(eta) * math.exp(-float(entropy)))
        return _drop(logits, probabilities < limit)


@dataclass(frozen=True, slots=True)
class EpsilonCutoff:
    """``epsilon_cutoff``: drops tokens with ``p < epsilon`` (Hewitt et al. 2022)."""

    epsilon: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        return _drop(logits, logits.softmax(-1) < self.epsilon * CUTOFF_UNIT)


@dataclass(frozen=True, slots=True)
class Typical:
    """``typical_p``: keeps the smallest set with probability p of the tokens whose surprise
    ``-log p`` is nearest to the entropy (Meister et al. 2022). Alone among the truncations it may
    drop the likeliest token."""

    p: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        probabilities, logs, entropy = _information(logits)
        order = (-logs - entropy).abs().argsort(stable=True)
        ordered = probabilities[order]
        before = ordered.cumsum(0) - ordered
        kept = order[(before < self.p) | (torch.arange(len(order), device=order.device) == 0)]
        result = torch.full_like(logits, NEVER)
        result[kept] = logits[kept]
        return result


@dataclass(frozen=True, slots=True)
class SurpriseLimit:
    """Drops tokens with ``-log2 p > mu``: the truncation of Mirostat 2 (Basu et al. 2021)."""

    mu: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        return _drop(logits, logits.log_softmax(-1) / -math.log(2) > self.mu)
