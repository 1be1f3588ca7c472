"""Stages against repeating longer stretches of text. ``logits`` float32 [V]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingle.sampling.stages import NEVER, History


@dataclass(frozen=True, slots=True)
class NoRepeatNgram:
    """``no_repeat_ngram_size`` n: bars every token that would end a run of n tokens seen before in
    prompt or output (transformers' ``NoRepeatNGramLogitsProcessor``)."""

    size: int

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        tokens = [*history.prompt_token_ids, *history.output_token_ids]
        head = self.size - 1
        last = tokens[len(tokens) - head :]
        barred = (
            {
                tokens[i + head]
                for i in range(len(tokens) - head)
                if tokens[i + head - 1] == last[-1] and tokens[i : i + head] == last
            }
            if head
            else set(tokens)
        )
        logits[sorted(barred)] = NEVER
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """``dry_*``: a token that would lengthen a repeated run of m tokens loses ``multiplier * base
    ** (m - allowed_length)`` when m is at least the allowed length (p-e-w's DRY). A run neither
    crosses nor is followed by a breaker.

    Attributes:
        multiplier: 0 is off.
        base: Growth per token.
        allowed_length: Shorter runs cost nothing.
        breakers: Token ids that end a run.
        num_tokens: Tokens looked back at; 0 looks at all.
        max_ngram: Longest run counted.
        max_occurrences: Places of the last token looked at, latest first.
        early_exit_match_len: A run this long ends the search.
    """

    multiplier: float
    base: float
    allowed_length: int
    breakers: frozenset[int]
    num_tokens: int
    max_ngram: int
    max_occurrences: int
    early_exit_match_len: int

    def __call__(self, logits: torch.Tensor, history: History) -> torch.Tensor:
        tokens = [*history.prompt_token_ids, *history.output_token_ids]
        for token_id, length in self._runs(tokens[-self.num_tokens :]).items():
            if length >= self.allowed_length:
                # float32 ends at 10 ** 38; a run that long is barred either way.
                growth = min(length - self.allowed_length, 32)
                logits[token_id] -= self.multiplier * self.base**growth
        return logits

    def _runs(self, tokens: Sequence[int]) -> dict[int, int]:
        """By next token, the longest run it would lengthen."""
        runs: dict[int, int] = {}
        if not tokens or tokens[-1] in self.breakers:
            return runs
        num_seen = 0
        for place in range(len(tokens) - 2, -1, -1):
            if tokens[place] != tokens[-1]:
                continue
            num_seen += 1
            following = tokens[place + 1]
            if following not in self.breakers:
                length = self._length(tokens, place)
                runs[following] = max(length, runs.get(following, 0))
                if length >= self.early_exit_match_len:
                    break
            if num_seen == self.max_occurrences:
                break
        return runs

    def _length(self, tokens: Sequence[int], place: int) -> int:
        """Tokens up to ``place`` that equal those at the end."""
        length = 1
        while length < min(self.max_ngram, place + 1):
            token_id = tokens[place - length]
            if token_id != tokens[-1 - length] or token_id in self.breakers:
                break
            length += 1
        return length
