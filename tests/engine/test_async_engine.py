"""Streams from one engine thread: many at once, slow ones, ones that leave, and the end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from ingle.engine.async_engine import AsyncEngine
from ingle.engine.engine_core import EngineCore
from ingle.engine.engine_thread import EngineThread
from ingle.engine.streams import Mailbox, Stream, merge_output
from ingle.errors import CapacityError, EngineDeadError, RequestError
from ingle.request import CompletionOutput, RequestOutput, SamplingParams


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **options})


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@asynccontextmanager
async def serving(core: EngineCore, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core, **options)
    engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


async def whole(engine: AsyncEngine, name: str, prompt: list[int], **options: Any) -> RequestOutput:
    """A request's whole output."""
    result: RequestOutput | None = None
    async for output in engine.generate(name, prompt, greedy(**options)):
        if result is None:
            result = output
        else:
            merge_output(result, output)
    assert result is not None
    assert result.finished
    return result


async def settled(engine: AsyncEngine, core: EngineCore) -> None:
    """Waits until the engine thread has read everything posted so far."""
    await whole(engine, "settle", [1], max_tokens=1)
    assert not core.has_work()


class Gate:
    """Holds the runner back until it is opened, step by step or for good."""

    def __init__(self, core: EngineCore) -> None:
        self.entered = threading.Semaphore(0)
        self._pass = threading.Semaphore(0)
        self._is_open = False
        core.runner.before = self._wait  # type: ignore[attr-defined]

    def _wait(self, _: Any) -> None:
        if not self._is_open:
            self.entered.release()
            self._pass.acquire()

    async def reached(self) -> None:
        """Waits until a step has begun."""
        await asyncio.to_thread(self.entered.acquire)

    def let_one_pass(self) -> None:
        self._pass.release()

    def open(self) -> None:
        self._is_open = True
        self._pass.release()


def test_a_stream_has_the_tokens_of_an_undisturbed_run(
    core_of: Any, undisturbed_tokens: Any, text_of: Any
) -> None:
    async def test() -> None:
        async with serving(core_of()) as engine:
            result = await whole(engine, "a", [1, 2, 3])
            tokens, _ = undisturbed_tokens([1, 2, 3], greedy(), 0, 100)
            assert result.outputs[0].token_ids == tokens
            assert result.outputs[0].text == text_of(tokens)

    run(test())


def test_a_hundred_streams_of_which_every_tenth_leaves(core_of: Any) -> None:
    core = core_of(num_blocks=150, max_num_seqs=16, max_model_len=500)

    async def reader(engine: AsyncEngine, n: int) -> None:
        count = 3 if n % 15 == 0 else 1
        prompt = [1 + n % 22] * (n % 30 + 1)
        if n % 10 == 0:
            stream = engine.generate(f"r{n}", prompt, greedy(n=count, max_tokens=400))
            async with aclosing(stream):
                async for _ in stream:
                    return
        result = await whole(engine, f"r{n}", prompt, n=count, max_tokens=30)
        assert [len(c.token_ids) for c in result.outputs] == [30] * count

    async def test() -> None:
        async with serving(core) as engine:
            await asyncio.gather(*(reader(engine, n) for n in range(100)))
            await whole(engine, "r0", [1])  # an aborted id can be used again
            stats = engine.stats()
            assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
            assert stats.kv_cache_used_blocks == 0
            assert stats.requests_finished_total["abort"] == 4 * 3 + 6

    run(test())
    core.scheduler.check_integrity()


def test_a_cancelled_reader_aborts_its_request(core_of: Any) -> None:
    core = core_of()
    gate = Gate(core)

    async def test() -> None:
        async with serving(core) as engine:
            task = asyncio.create_task(whole(engine, "a", [1], max_tokens=90))
            await gate.reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            await settled(engine, core)
            assert core.stats().requests_finished_total == {"abort": 1, "length": 1}
            assert core.stats().generation_tokens_total <= 3

    run(test())


def test_a_reader_that_leaves_between_tokens_aborts_its_request(core_of: Any) -> None:
    core = core_of()
    gate = Gate(core)

    async def test() -> None:
        async with serving(core) as engine:
            stream = engine.generate("a", [1], greedy(max_tokens=90))
            gate.let_one_pass()
            await anext(stream)
            await stream.aclose()
            gate.open()
            await settled(engine, core)
            assert core.stats().requests_finished_total["abort"] == 1

    run(test())


def test_an_id_left_behind_serves_its_next_owner_only(
    core_of: Any, undisturbed_tokens: Any
) -> None:
    core = core_of()

    async def test() -> None:
        async with serving(core) as engine:
            for _ in range(20):
                stream = engine.generate("same", [1], greedy(max_tokens=90))
                await anext(stream)
                await stream.aclose()
            result = await whole(engine, "same", [2])
            assert result.outputs[0].token_ids == undisturbed_tokens([2], greedy(), 0, 100)[0]

    run(test())


def test_a_reader_of_nothing_may_leave_before_it_is_told_the_end(core_of: Any) -> None:
    """A request of no tokens has ended before any step; the step that says so finds no reader."""
    core = core_of()

    async def test() -> None:
        gate = Gate(core)
        async with serving(core) as engine:
            other = asyncio.create_task(whole(engine, "other", [1], max_tokens=2))
            await gate.reached()
            reader = asyncio.create_task(whole(engine, "a", [1], max_tokens=0))
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            gate.open()
            await other
            await settled(engine, core)

    run(test())


def test_an_abort_from_outside_ends_the_stream_with_that_reason(core_of: Any) -> None:
    core = core_of()

    async def test() -> None:
        async with serving(core) as engine:
            reasons = []
            async for output in engine.generate("a", [1], greedy(max_tokens=90, n=2)):
                engine.abort("a")
                reasons += [c.finish_reason for c in output.outputs if c.finish_reason]
            assert reasons == ["abort", "abort"]
            engine.abort("a")
            engine.abort("unknown")
            await settled(engine, core)

    run(test())


def test_a_slow_reader_holds_up_nobody_and_gets_its_text_merged(
    core_of: Any, undisturbed_tokens: Any
) -> None:
    core = core_of()

    async def test() -> None:
        async with serving(core) as engine:
            slow = engine.generate("slow", [1], greedy(max_tokens=90))
            first = await anext(slow)
            for n in range(5):
                await whole(engine, f"quick{n}", [2, n + 1], max_tokens=95)
            rest = [output async for output in slow]
            tokens = [t for o in (first, *rest) for t in o.outputs[0].token_ids]
            assert tokens == undisturbed_tokens([1], greedy(max_tokens=90), 0, 100)[0]
            assert len(rest) <= 2  # what came while it did not read is one piece

    run(test())


def test_wrong_requests_fail_at_the_first_step_and_hurt_nobody(core_of: Any) -> None:
    core = core_of(max_queue_len=2, max_num_seqs=1)
    gate = Gate(core)

    async def test() -> None:
        async with serving(core) as engine:
            with pytest.raises(RequestError, match="empty"):
                await whole(engine, "a", [])
            with pytest.raises(RequestError, match="empty"):
                engine.check_request([], greedy())
            first = asyncio.create_task(whole(engine, "a", [1]))
            await gate.reached()
            second = asyncio.create_task(whole(engine, "b", [1]))
            same = asyncio.create_task(whole(engine, "a", [1]))
            third = asyncio.create_task(whole(engine, "c", [1]))
            # At once: the step under way need not end before it is known.
            with pytest.raises(CapacityError, match="2 requests are waiting"):
                await third
            gate.open()
            with pytest.raises(RequestError, match="in use"):
                await same
            await first
            await second

    run(test())


def test_a_failed_step_reaches_every_stream_and_every_later_call(core_of: Any) -> None:
    core = core_of()
    deaths: list[EngineDeadError] = []

    def fail(_: Any) -> None:
        if core.runner.num_steps > 10:
            raise ValueError("the model broke")

    core.runner.before = fail

    async def test() -> None:
        engine = AsyncEngine(core, on_death=deaths.append)
        engine.start()
        engine.check_health()
        results = await asyncio.gather(
            *(whole(engine, name, [n + 1], max_tokens=90) for n, name in enumerate("abc")),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [EngineDeadError] * 3
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await whole(engine, "late", [1])
        engine.abort("late")
        await engine.shutdown()
        assert engine.stats().kv_cache_used_blocks == 0

    run(test())
    assert len(deaths) == 1


def test_an_error_outside_the_step_reaches_every_stream_too(core_of: Any) -> None:
    core = core_of()

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    core.add_request = broken

    async def test() -> None:
        async with serving(core) as engine:
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await whole(engine, "a", [1])
            with pytest.raises(EngineDeadError):
                engine.check_health()

    run(test())


def test_requests_still_in_the_inbox_learn_of_the_death(core_of: Any) -> None:
    core = core_of()
    gate = Gate(core)

    async def test() -> None:
        async with serving(core) as engine:
            first = asyncio.create_task(whole(engine, "a", [1]))
            await gate.reached()
            second = asyncio.create_task(whole(engine, "b", [1]))
            await asyncio.sleep(0)
            core.scheduler.update = None  # what the step will trip over
            gate.open()
            results = await asyncio.gather(first, second, return_exceptions=True)
            assert [type(result) for result in results] == [EngineDeadError] * 2

    run(test())


class SpyInbox:
    """A queue that says when somebody sleeps on it, and counts every look."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.asleep = threading.Event()
        self.num_looks = 0

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def empty(self) -> bool:
        self.num_looks += 1
        return self._queue.empty()

    def get(self, timeout: float | None = None) -> Any:
        if timeout is not None and self._queue.empty():
            raise Empty  # as if the time had passed
        self.num_looks += 1
        if self._queue.empty():
            self.asleep.set()
        return self._queue.get()


def test_an_idle_thread_sleeps_on_its_inbox_and_never_looks_around(core_of: Any) -> None:
    core = core_of()
    inbox = SpyInbox()

    async def test() -> None:
        engine = AsyncEngine(core)
        engine._thread._inbox = inbox  # type: ignore[assignment]
        engine.start()
        await asyncio.to_thread(inbox.asleep.wait)
        inbox.asleep.clear()
        await whole(engine, "a", [1])
        await asyncio.to_thread(inbox.asleep.wait)
        looks = inbox.num_looks
        # While it sleeps it is inside get(), without a time-out: nothing else runs in it.
        await whole_elsewhere()
        assert inbox.num_looks == looks
        assert not core.has_work()
        await engine.shutdown()

    async def whole_elsewhere() -> None:
        async with serving(core_of()) as other:
            await whole(other, "b", [2], max_tokens=50)

    run(test())


def test_the_loop_is_woken_once_for_a_step_however_many_streams(core_of: Any) -> None:
    core = core_of(max_num_seqs=16)
    gate = Gate(core)

    async def test() -> None:
        async with serving(core) as engine:
            first = asyncio.create_task(whole(engine, "first", [1], max_tokens=1))
            await gate.reached()
            tasks = [
                asyncio.create_task(whole(engine, f"r{n}", [n + 1], max_tokens=1))
                for n in range(10)
            ]
            await asyncio.sleep(0)  # now all ten are in the inbox
            gate.let_one_pass()
            await first
            await gate.reached()
            loop = asyncio.get_running_loop()
            calls = []
            original = loop.call_soon_threadsafe

            def counting(callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
                calls.append(callback)
                return original(callback, *args, **options)

            loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
            gate.open()
            await asyncio.gather(*tasks)
            loop.call_soon_threadsafe = original  # type: ignore[method-assign]
            assert len([c for c in calls if getattr(c, "__name__", "") == "_notify"]) == 1

    run(test())


def test_shutdown_lets_requests_finish_in_their_time(core_of: Any) -> None:
    core = core_of()
    gate = Gate(core)

    async def test() -> None:
        engine = AsyncEngine(core)
        engine.start()
        task = asyncio.create_task(whole(engine, "a", [1], max_tokens=60))
        await gate.reached()
        stopping = asyncio.create_task(engine.shutdown(drain_timeout=50))
        await asyncio.sleep(0)
        assert engine.is_draining
        with pytest.raises(EngineDeadError, match="shutting down"):
            await whole(engine, "late", [1])
        gate.open()
        assert len((await task).outputs[0].token_ids) == 60
        await stopping
        with pytest.raises(EngineDeadError):
            engine.check_health()

    run(test())


def test_a_second_shutdown_with_less_time_ends_what_is_left(core_of: Any) -> None:
    core = core_of()
    gate = Gate(core)

    async def test() -> None:
        engine = AsyncEngine(core)
        engine.start()
        task = asyncio.create_task(whole(engine, "a", [1], max_tokens=90))
        await gate.reached()
        first = asyncio.create_task(engine.shutdown(drain_timeout=1000))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.shutdown())
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        await asyncio.gather(first, second)
        assert core.stats().kv_cache_used_blocks == 0

    run(test())


def test_an_engine_never_started_shuts_down_too(core_of: Any) -> None:
    async def test() -> None:
        engine = AsyncEngine(core_of())
        with pytest.raises(EngineDeadError, match="start"):
            await whole(engine, "a", [1])
        await engine.shutdown()

    run(test())


def test_two_loops_share_one_engine_and_a_closed_one_is_cleaned_up_after(core_of: Any) -> None:
    core = core_of()
    gate = Gate(core)
    engine = AsyncEngine(core)
    engine.start()

    async def begin() -> None:
        stream = engine._open("orphan", [1], greedy(max_tokens=90), None)
        await gate.reached()
        assert stream.request_id == "orphan"

    asyncio.run(begin())  # its loop is closed while the request runs

    async def rest() -> None:
        gate.open()
        await settled(engine, core)
        assert core.stats().requests_finished_total["abort"] == 1
        await engine.shutdown()

    run(rest())


def test_info_tokenizer_and_stats_are_public(core_of: Any) -> None:
    engine = AsyncEngine(core_of(max_model_len=64))
    assert (engine.info.model, engine.info.max_model_len) == ("letters", 64)
    assert engine.tokenizer is not None
    assert engine.tokenizer.encode("abc") == [1, 2, 3]
    assert engine.stats().kv_cache_blocks == 39


def test_the_throughput_is_logged_every_ten_seconds_while_busy_and_never_when_idle(
    core_of: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ingle.engine")
    core = core_of()
    clock = iter([0.0, 3.0, 10.5, 15.0, 100.0, 105.0])
    monkeypatch.setattr("ingle.engine.throughput_log.time.monotonic", lambda: next(clock))
    log = EngineThread(core)._throughput
    core.metrics.generation_tokens = 100
    log.after_step()
    core.metrics.generation_tokens = 310
    for _ in range(3):
        log.after_step()
    log.pause()
    for _ in range(2):
        log.after_step()
    (record,) = caplog.records
    assert "generation 20.0 tokens/s" in record.getMessage()


def piece(index: int, text: str, *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(index=index, text=text, token_ids=[len(text)])
    completion.finish_reason = "stop" if finished else None
    return RequestOutput(request_id="a", outputs=[completion], finished=finished)


def test_merging_keeps_order_by_completion() -> None:
    merged = piece(0, "a")
    for later in (piece(1, "x"), piece(0, "bc"), piece(1, "yz", finished=True)):
        merge_output(merged, later)
    assert [(c.index, c.text, c.token_ids) for c in merged.outputs] == [
        (0, "abc", [1, 2]),
        (1, "xyz", [1, 2]),
    ]
    assert merged.finished
    assert [c.finish_reason for c in merged.outputs] == [None, "stop"]


def test_a_mailbox_holds_one_output_per_stream_and_the_error_last() -> None:
    async def test() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream = Stream("a", mailbox)
        for _ in range(1000):
            mailbox.put(stream, piece(0, "x"))
        mailbox.fail(stream, EngineDeadError("gone"))
        assert mailbox.wake()
        assert mailbox.wake()
        assert (await stream.next()).outputs[0].text == "x" * 1000
        with pytest.raises(EngineDeadError, match="gone"):
            await stream.next()
        mailbox.put(stream, piece(0, "x"))
        mailbox.forget(stream)
        assert mailbox.take(stream) is None

    run(test())
