"""Work in a thread that ends with it."""

from __future__ import annotations

import threading

import pytest

from ingle.engine.passing_thread import run_in_passing_thread
from ingle.errors import ConfigError


def test_the_result_comes_from_another_thread_that_is_gone() -> None:
    thread = run_in_passing_thread(threading.current_thread, "a-name")
    assert thread is not threading.current_thread()
    assert thread.name == "a-name"
    assert not thread.is_alive()


def test_an_error_is_the_callers() -> None:
    def fail() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        run_in_passing_thread(fail, "a-name")
