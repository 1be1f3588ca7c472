"""Work in a thread that ends with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class _Work(Generic[Result]):
    """A call, and what became of it."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._results[0]


def run_in_passing_thread(call: Callable[[], Result], name: str) -> Result:
    """What ``call()`` gives or raises, run in a thread that is gone afterwards.

    Every thread that runs one of torch's parallel operators on a CPU keeps OpenMP helpers until it
    ends, and GNU's OpenMP counts them all: with more of them than cores (those of the thread that
    loaded a model, and those of the thread that runs it) its threads sleep at every barrier where
    they would spin, and a decode step takes twice as long (docs/benchmarks.md).

    An interrupt (Ctrl-C) leaves the thread behind; it is a daemon and holds no process up.

    Args:
        call: What to run.
        name: The thread's.

    Raises:
        Whatever ``call`` raises.
    """
    work = _Work(call)
    thread = threading.Thread(target=work.run, name=name, daemon=True)
    thread.start()
    thread.join()
    return work.result()
