"""Runs requests through an engine core and notes when their tokens come.

This is the path of ``LLM.generate``: scheduler, model, sampler, detokenizer.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ingle.engine.engine_core import EngineCore
from ingle.errors import EngineDeadError
from ingle.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prompt's times.

    Attributes:
        num_tokens: Of the prompt.
        seconds: To its first token, nothing being cached.
        cached_seconds: The same when all but its last token is in the prefix cache; None without
            a cache.
    """

    num_tokens: int
    seconds: float
    cached_seconds: float | None


class Measurer:
    """Measures one engine.

    Args:
        core: The engine; nobody else may use it meanwhile.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._ids = itertools.count()
        self._draw = random.Random(0)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens."""
        vocab_size = self._core.info.vocab_size
        return [self._draw.randrange(vocab_size) for _ in range(num_tokens)]

    def decode(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Tokens a second over all of ``batch`` sequences, from when each has its first token."""
        prompts = [self.prompt(num_prompt) for _ in range(batch)]
        counts = dict.fromkeys(self._add(prompts, num_output), 0)
        begun, num_before, now = None, 0, 0.0
        while self._core.has_work():
            self._step(counts)
            now = time.perf_counter()
            if begun is None and all(counts.values()):
                begun, num_before = now, sum(counts.values())
        assert begun is not None
        return (sum(counts.values()) - num_before) / (now - begun)

    def prefill(self, num_tokens: int) -> Prefill:
        """A prompt's time to its first token, and then that of the same with another last token."""
        prompt = self.prompt(num_tokens)
        seconds = self.first_token(prompt)
        cached = None
        if self._core.scheduler.blocks.enable_prefix_caching:
            cached = self.first_token([*prompt[:-1], (prompt[-1] + 1) % self._core.info.vocab_size])
        return Prefill(num_tokens=num_tokens, seconds=seconds, cached_seconds=cached)

    def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of ``prompt``."""
        begun = time.perf_counter()
        counts = dict.fromkeys(self._add([prompt], 1), 0)
        while not all(counts.values()):
            self._step(counts)
        seconds = time.perf_counter() - begun
        while self._core.has_work():
            self._core.step()
        return seconds

    def _add(self, prompts: Sequence[Sequence[int]], num_output: int) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        names = [f"bench-{next(self._ids)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._core.add_request(name, list(prompt), params)
        return names

    def _step(self, counts: dict[str, int]) -> None:
        for output in self._core.step():
            for completion in output.outputs:
                if completion.error is not None:
                    raise EngineDeadError(completion.error)
                counts[output.request_id] += len(completion.token_ids)
