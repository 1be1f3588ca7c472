"""Ctrl-C while a model is loaded: the loading thread cannot be stopped, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ingle.engine.passing_thread import run_in_passing_thread
from ingle_server import command, engine_adapter
from ingle_server.config import ServerConfig


def test_ctrl_c_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def load(_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(60)

    def leave(code: int) -> None:
        assert not is_over.is_set()
        raise SystemExit(code)

    monkeypatch.setattr(
        engine_adapter,
        "load_engine",
        lambda config: run_in_passing_thread(lambda: load(config), "loader"),
    )
    monkeypatch.setattr(command, "_leave_at_once", leave)
    models: Any = [SimpleNamespace(config=None)]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with socket.socket() as sock, pytest.raises(SystemExit) as left:
            command._serve_on(sock, models, ServerConfig(), 0.0)
    finally:
        signal.signal(signal.SIGINT, handler)
        is_over.set()
    assert left.value.code == 130
