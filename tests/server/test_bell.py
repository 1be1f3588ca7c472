"""The bell that wakes a stream for its next token."""

from __future__ import annotations

import asyncio

from ingle_server.bell import Bell


def test_a_ring_before_the_wait_counts() -> None:
    async def scene() -> None:
        bell = Bell()
        bell.ring()
        assert await bell.wait(60)
        bell.silence()
        assert not await bell.wait(0)

    asyncio.run(scene())


def test_a_ring_wakes_who_waits_and_its_timer_serves_the_next_wait() -> None:
    async def scene() -> None:
        bell = Bell()
        for _ in range(3):
            asyncio.get_running_loop().call_soon(bell.ring)
            assert await bell.wait(60)
            bell.silence()
        assert not await bell.wait(0.001)
        bell.close()

    asyncio.run(scene())


def test_a_wait_that_begins_later_lasts_its_full_time() -> None:
    async def scene() -> None:
        bell, loop = Bell(), asyncio.get_running_loop()
        loop.call_later(0.02, bell.ring)
        assert await bell.wait(0.03)
        bell.silence()
        begun = loop.time()
        assert not await bell.wait(0.03)
        assert loop.time() - begun >= 0.03

    asyncio.run(scene())


def test_a_wait_that_is_cancelled_leaves_the_bell_usable() -> None:
    async def scene() -> None:
        bell = Bell()
        task = asyncio.create_task(bell.wait(60))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        bell.ring()
        assert await bell.wait(60)
        bell.close()

    asyncio.run(scene())
