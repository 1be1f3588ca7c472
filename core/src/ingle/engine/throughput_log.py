"""A line in the log every ten seconds, while the engine is busy."""

from __future__ import annotations

import logging
import time

from ingle.engine.engine_core import EngineCore

logger = logging.getLogger("ingle.engine")

INTERVAL_SECONDS = 10.0


class ThroughputLog:
    """Logs what an engine does, at most every ten seconds and never while it is idle."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._since: float | None = None
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def pause(self) -> None:
        """Says that the engine is idle: the clock stops."""
        self._since = None

    def after_step(self) -> None:
        """Logs a line when one is due."""
        now = time.monotonic()
        if self._since is None:
            self._restart(now)
        elif now - self._since >= INTERVAL_SECONDS:
            self._log(now - self._since)
            self._restart(now)

    def _restart(self, now: float) -> None:
        metrics = self._core.metrics
        self._since = now
        self._prompt_tokens = metrics.prompt_tokens
        self._generation_tokens = metrics.generation_tokens

    def _log(self, seconds: float) -> None:
        metrics, scheduler = self._core.metrics, self._core.scheduler
        logger.info(
            "%d running, %d waiting, KV cache %.0f %% used; prompts %.1f tokens/s, generation "
            "%.1f tokens/s",
            len(scheduler.running),
            len(scheduler.waiting),
            100 * scheduler.blocks.usage,
            (metrics.prompt_tokens - self._prompt_tokens) / seconds,
            (metrics.generation_tokens - self._generation_tokens) / seconds,
        )
