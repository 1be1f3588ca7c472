"""Compares what two models predict, a few rows at a time.

Letters: T predicted tokens, R rows, V vocabulary, B runs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from ingle.quantize.teacher_forcing import ForcedModel

CHUNK_VALUES: Final = 1 << 23
"""Logits held per model at a time: 32 MiB in float32, and about five times that while compared."""
RUN: Final = 64
"""Neighbouring tokens are not independent, so the bootstrap draws runs of this many."""
RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What ``Evaluation`` says of two models; the fields have the same names."""

    perplexity: float
    kl: float
    top1: float
    kl_interval: tuple[float, float]
    top1_interval: tuple[float, float]
    num_tokens: int


def diverge(
    reference: ForcedModel, model: ForcedModel, windows: Sequence[Sequence[int]]
) -> Divergence:
    """Both have read ``windows``: every token but the first of each is predicted."""
    rows, targets = _predictions(windows)
    columns = [
        _compare(reference.logits(some), model.logits(some), wanted)
        for some, wanted in _chunks(rows, targets, model.info.vocab_size)
    ]
    loss, kl, agreed = (torch.cat(column).double() for column in zip(*columns, strict=True))
    return Divergence(
        perplexity=float(loss.mean().exp()),
        kl=float(kl.mean()),
        top1=float(agreed.mean()),
        kl_interval=bootstrap_interval(kl),
        top1_interval=bootstrap_interval(agreed),
        num_tokens=len(rows),
    )


def _predictions(windows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that predict a token of their window, and the tokens: int64 [T] each."""
    rows: list[int] = []
    targets: list[int] = []
    start = 0
    for window in windows:
        rows.extend(range(start, start + len(window) - 1))
        targets.extend(window[1:])
        start += len(window)
    return torch.tensor(rows), torch.tensor(targets)


def _chunks(
    rows: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = max(1, CHUNK_VALUES // vocab_size)
    yield from zip(torch.split(rows, size), torch.split(targets, size), strict=True)


def _compare(
    reference: torch.Tensor, model: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits [R, V]: negative log-likelihood, KL(reference || model), agreement; [R] each."""
    ours = torch.log_softmax(model, -1)
    theirs = torch.log_softmax(reference.to(ours.device), -1)
    loss = -ours.gather(1, targets[:, None].to(ours.device))[:, 0]
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    agreed = (ours.argmax(-1) == theirs.argmax(-1)).float()
    return loss.cpu(), kl.cpu(), agreed.cpu()


def bootstrap_interval(values: torch.Tensor) -> tuple[float, float]:
    """Where the mean of ``values`` [T] lies with 95 %, when runs of 64 are drawn again."""
    runs = [run for run in torch.split(values, RUN) if len(run) == RUN] or [values]
    means = torch.stack([run.mean() for run in runs])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(runs), (RESAMPLES, len(runs)), generator=generator)
    tail = (1 - CONFIDENCE) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=means.dtype)
    low, high = torch.quantile(means[drawn].mean(1), ends).tolist()
    return float(low), float(high)
