"""Where each sequence stands in its grammar, and the tokens that may come next. V: vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher

from ingle.errors import RequestError
from ingle.request import GrammarSpec
from ingle.sampling.grammar import GrammarCompiler
from ingle.sampling.stages import NEVER

MIN_KEPT = 64


@dataclass(slots=True)
class GrammarState:
    """One sequence's matcher, and how many of its tokens the matcher has seen."""

    matcher: LLMatcher
    num_consumed: int = 0

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Moves to the end of ``output_token_ids``, back or forth.

        Raises:
            RequestError: When they do not follow the grammar.
        """
        ahead = self.num_consumed - len(output_token_ids)
        if ahead > 0:
            self.matcher.rollback(ahead)
        for token_id in output_token_ids[self.num_consumed :]:
            # With ignore_eos a finished answer goes on with end-of-sequence tokens.
            if not self.matcher.is_stopped():
                self.matcher.consume_token(token_id)
            self.check()
        self.num_consumed = len(output_token_ids)

    def bar(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` float32 [V] without the tokens that can't come next."""
        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self.check()
        size = logits.shape[0]
        barred = np.unpackbits(packed, bitorder="little", count=size) == 0
        return logits.masked_fill_(torch.from_numpy(barred).to(logits.device), NEVER)

    def check(self) -> None:
        """Raises RequestError once the matcher has failed; it never recovers."""
        if self.matcher.is_error():
            raise RequestError(f"The grammar failed: {self.matcher.get_error()[:200]}")


class GrammarStates:
    """The states of the sequences that were sampled last.

    A state is a cache: one that was dropped is built anew from the sequence's output tokens, so
    preemption, batching and the prefix cache need no care.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._states: OrderedDict[str, GrammarState] = OrderedDict()

    def at(
        self, sequence_id: str, spec: GrammarSpec, output_token_ids: Sequence[int]
    ) -> GrammarState:
        """The state of a sequence after ``output_token_ids``.

        Raises:
            RequestError: When the grammar failed.
        """
        if self._compiler is None:
            raise RequestError("This engine has no tokenizer, so it can follow no grammar.")
        state = self._states.get(sequence_id)
        if state is None:
            state = self._states[sequence_id] = GrammarState(self._compiler.matcher(spec))
        self._states.move_to_end(sequence_id)
        state.catch_up(output_token_ids)
        return state

    def trim(self, num_rows: int) -> None:
        """Drops the oldest states, leaving enough for two batches of ``num_rows``."""
        while len(self._states) > max(MIN_KEPT, 2 * num_rows):
            self._states.popitem(last=False)
