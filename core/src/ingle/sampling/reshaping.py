"""Stages that change how probability is spread over the tokens that are left.

``logits`` float32 [V]; what is barred already (minus infinity) stays so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ingle.sampling.stages import NEVER, History
from ingle.sampling.uniform import uniform

XTC_STREAM = 0x5854_4300_5854_4300
"""Sets XTC's random numbers apart from those that draw tokens."""


@dataclass(frozen=True, slots=True)
class DynamicTemperature:
    """``dynatemp_min``, ``dynatemp_max``, ``dynatemp_exponent``: divides by ``min + (max - min) *
    (H / H_max) ** exponent``; H is the entropy and H_max the logarithm of the number of tokens left
    (KoboldCpp)."""

    low: float
    high: float
    exponent: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        logs = logits.log_softmax(-1)
        entropy = -float((logs.exp() * logs).nansum())
        most = math.log(max(int(torch.isfinite(logits).sum()), 1))
        share = min(max(entropy / most, 0.0), 1.0) if most else 0.0
        temperature = self.low + (self.high - self.low) * share**self.exponent
        return logits.div_(max(temperature, 1e-5))


@dataclass(frozen=True, slots=True)
class Quadratic:
    """``smoothing_factor`` f, ``smoothing_curve`` c: with ``d = logit - max`` the logit becomes
    ``max - k * f * d**2 + s * f * d**3``, where ``k = (3 - c) / 2`` and ``s = (c - 1) / 2``
    (kalomaze's smooth sampling)."""

    factor: float
    curve: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        top = logits.max()
        distance = logits - top
        k, s = (3 - self.curve) / 2, (self.curve - 1) / 2
        smooth = top - k * self.factor * distance**2 + s * self.factor * distance**3
        return torch.where(torch.isfinite(logits), smooth, NEVER)


@dataclass(frozen=True, slots=True)
class ExcludeTopChoices:
    """``xtc_threshold``, ``xtc_probability``: with that probability drops every token of at least
    the threshold's probability except the least likely of them (p-e-w's XTC). The chance comes from
    the request's seed and the position."""

    threshold: float
    probability: float
    seed: int

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        chance = uniform(self.seed ^ XTC_STREAM, len(history.output_token_ids))
        if chance >= self.probability:
            return logits
        probabilities = logits.softmax(-1)
        above = (probabilities >= self.threshold).nonzero().flatten()
        if len(above) < 2:
            return logits
        kept = above[probabilities[above].argmin()]
        value = logits[kept].clone()
        logits[above] = NEVER
        logits[kept] = value
        return logits


@dataclass(frozen=True, slots=True)
class Skew:
    """``skew``: with probabilities sorted downwards, their cumulated sum C becomes ``C **
    exp(skew)``; above 0 favours the unlikely (ExLlamaV2)."""

    skew: float

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        ordered, order = logits.double().softmax(-1).sort(descending=True, stable=True)
        cumulated = (ordered.cumsum(0) / ordered.sum()).clamp(max=1.0) ** math.exp(self.skew)
        shares = cumulated.diff(prepend=cumulated.new_zeros(1))
        result = torch.empty_like(logits)
        result[order] = shares.log().to(logits.dtype)
        return result.masked_fill_(torch.isinf(logits), NEVER)
