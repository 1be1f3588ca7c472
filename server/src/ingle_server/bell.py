"""Wakes one coroutine, cheaply: what waits for every token must cost next to nothing.

An ``asyncio.Event`` under ``asyncio.timeout`` makes and drops a timer at each wait; here one timer
stands as long as somebody goes on waiting, and is looked at when it goes off.
"""

from __future__ import annotations

import asyncio


class Bell:
    """Rung by anybody on the event loop, heard by one coroutine at a time."""

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    def ring(self) -> None:
        """Wakes who waits, or lets the next one that would wait go on at once."""
        self._rung = True
        self._wake()

    def silence(self) -> None:
        """Forgets that it was rung."""
        self._rung = False

    def close(self) -> None:
        """Drops the timer; who waits is not woken by it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self, seconds: float) -> bool:
        """Whether it was rung, within ``seconds`` or before."""
        if not self._rung:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + seconds
            if self._timer is not None and self._timer.when() > self._deadline:
                self.close()
            if self._timer is None:
                self._timer = loop.call_at(self._deadline, self._alarm)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._rung

    def _alarm(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        loop = self._waiter.get_loop()
        if loop.time() < self._deadline:  # it was rung since, and somebody waits again
            self._timer = loop.call_at(self._deadline, self._alarm)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
