"""Draws one token per row: the stages a request needs, then greedy or a seeded draw.

R rows, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ingle.errors import RequestError
from ingle.request import SamplingParams, TokenLogprob
from ingle.sampling.grammar import GrammarCompiler
from ingle.sampling.grammar_states import GrammarState, GrammarStates
from ingle.sampling.mirostat import MirostatStates, surprise_bits
from ingle.sampling.pipeline import stages_for
from ingle.sampling.stages import NEVER, History
from ingle.sampling.uniform import uniform

logger = logging.getLogger("ingle.sampling")

ROW_FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What code that works on one row's logits can raise."""
ROLL_BACK_STEP: Final = 0x9E37_79B9_7F4A_7C15
"""Sets the random numbers after each roll-back apart; odd, so that 64 bits never come round."""
CPU_OUT_OF_MEMORY: Final = "DefaultCPUAllocator"
"""torch raises a bare RuntimeError when the CPU allocator fails; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row's request.

    Attributes:
        params: How to sample.
        seed: The request's seed.
        history: What it has seen so far.
        sequence_id: Under which the state of its grammar is kept.
        after: The guess at the end of ``history``: the row is drawn only when the one before it
            drew that very token. None: the row follows what is known.
        barred: Tokens with which a banned string began when they were drawn here before.
        num_roll_backs: How often the request was sent back: it draws with new numbers since.
    """

    params: SamplingParams
    seed: int
    history: History
    sequence_id: str = ""
    after: int | None = None
    barred: tuple[int, ...] = ()
    num_roll_backs: int = 0

    @property
    def draw_seed(self) -> int:
        """The seed of this draw. With the old number, the neighbour in the vocabulary of a token
        that was barred would always take its place."""
        return self.seed + self.num_roll_backs * ROLL_BACK_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """What a row drew: a token, or why it could not; neither when the guess before it was wrong."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """Draws tokens for a batch of rows; each row as if it were alone.

    Args:
        eos_token_ids: The model's end-of-sequence tokens, barred by ``min_tokens``.
        grammars: Compiles the grammars that answers must follow; None refuses them.
    """

    def __init__(
        self, eos_token_ids: Sequence[int], grammars: GrammarCompiler | None = None
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammar_states = GrammarStates(grammars)
        self._mirostat_states = MirostatStates()

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[DrawnToken]:
        """``logits`` float32 [R, V], overwritten, to one token per row."""
        greedy = likeliest(logits)
        finite = are_finite(logits, greedy)
        drawn: list[DrawnToken] = []
        for index, row in enumerate(rows):
            if row.after is not None and drawn[-1].token_id != row.after:
                drawn.append(DrawnToken())  # its logits follow what was not drawn
            elif not finite[index]:
                drawn.append(DrawnToken(error="the model's logits for this request are not finite"))
            else:
                drawn.append(self._draw_alone(logits[index], row, greedy[index]))
        self._grammar_states.trim(len(rows))
        self._mirostat_states.trim(len(rows))
        return drawn

    def _draw_alone(self, logits: torch.Tensor, row: SamplingRow, greedy: int) -> DrawnToken:
        """As ``_draw``; whatever one row's options do wrong ends that row and no other.

        Lack of memory is the step's affair, and goes on to who runs it.
        """
        try:
            if row.params.structured is not None:
                return self._draw_structured(logits, row)
            return self._draw(logits, row, greedy)
        except torch.OutOfMemoryError:
            raise
        except ROW_FAULTS as error:
            if CPU_OUT_OF_MEMORY in str(error):
                raise
            logger.exception("Sequence %r: drawing its token failed", row.sequence_id)
            return DrawnToken(error=f"drawing a token failed with {type(error).__name__}")

    def _draw_structured(self, logits: torch.Tensor, row: SamplingRow) -> DrawnToken:
        """As ``_draw``, among the tokens that the row's grammar allows."""
        try:
            assert row.params.structured is not None
            state = self._grammar_states.at(
                row.sequence_id, row.params.structured, row.history.output_token_ids
            )
            return self._draw(logits, row, -1, state)
        except RequestError as error:
            return DrawnToken(error=str(error))

    def _draw(
        self,
        logits: torch.Tensor,
        row: SamplingRow,
        greedy: int,
        grammar: GrammarState | None = None,
    ) -> DrawnToken:
        params = row.params
        raw = logits.log_softmax(-1) if params.logprobs is not None else None
        stages = stages_for(params, self._eos_token_ids, row.draw_seed)
        if grammar is not None:
            logits = grammar.bar(logits)
            if grammar.matcher.is_stopped():
                stages = ()  # only the end is left, whatever min_tokens says
        if row.barred:
            logits[list(row.barred)] = NEVER
        for stage in stages:
            logits = stage(logits, row.history)
        changed = bool(stages or row.barred or grammar is not None)
        if not params.greedy:
            token_id = self._pick(logits, row)
        else:
            token_id = likeliest(logits[None])[0] if changed else greedy
        if changed and not math.isfinite(float(logits[token_id])):
            return DrawnToken(error="every token is barred by this request's own options")
        logprob = None if raw is None else token_logprob(raw, token_id, params.logprobs or 0)
        return DrawnToken(token_id=token_id, logprob=logprob)

    def _pick(self, logits: torch.Tensor, row: SamplingRow) -> int:
        number = uniform(row.draw_seed, len(row.history.output_token_ids))
        if not row.params.mirostat_mode:
            return _pick(logits, number)
        states, tau = self._mirostat_states, row.params.mirostat_tau
        limit = states.limit(row.sequence_id, tau, row.history)
        token_id = _pick(limit(logits.clone(), row.history), number)
        surplus = surprise_bits(logits, token_id) - tau
        place = len(row.history.output_token_ids)
        states.saw(row.sequence_id, place, limit.mu - row.params.mirostat_eta * surplus)
        return token_id


def likeliest(logits: torch.Tensor) -> list[int]:
    """The first of the greatest entries of each row of ``logits`` float32 [R, V].

    On a CPU by NumPy, which searches with vector instructions: 3 us for 49,152 entries, where
    ``torch.argmax`` takes 80.
    """
    if logits.device.type == "cpu":
        found: list[int] = logits.numpy().argmax(-1).tolist()
        return found
    return [int(at) for at in logits.argmax(-1).tolist()]


def are_finite(logits: torch.Tensor, greatest: Sequence[int]) -> list[bool]:
    """Whether each row of ``logits`` [R, V] has a finite entry and none that is infinite or not a
    number, which would be its greatest, as ``likeliest`` found it."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        return [math.isfinite(rows[at, found]) for at, found in enumerate(greatest)]
    return torch.isfinite(logits.amax(-1)).tolist()


def _pick(logits: torch.Tensor, number: float) -> int:
    """The token at ``number`` (0 to 1) of the cumulated probabilities of ``logits`` [V]."""
    cumulated = logits.double().softmax(-1).cumsum(0)
    target = min(number * float(cumulated[-1]), float(cumulated[-1]) * (1 - 2**-52))
    return int(torch.searchsorted(cumulated, target, right=True))


def prompt_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """What ``logits`` float32 [R, V] say of the tokens ``token_ids`` that came after each row."""
    raw = logits.log_softmax(-1)
    at = torch.tensor(token_ids, device=raw.device)[:, None]
    chosen = raw.gather(1, at)
    ranks = ((raw > chosen).sum(-1) + 1).tolist()
    values, ids = raw.topk(num_top, -1)
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(
            token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(*top, strict=True))
        )
        for token_id, logprob, rank, top in zip(
            token_ids, chosen[:, 0].tolist(), ranks, tops, strict=True
        )
    ]


def token_logprob(raw: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability, rank and the ``num_top`` likeliest tokens from ``raw`` float32 [V]."""
    chosen = raw[token_id]
    rank = int((raw > chosen).sum()) + 1
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = raw.topk(num_top)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id=token_id, logprob=float(chosen), rank=rank, top=top)
