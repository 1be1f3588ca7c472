"""``ingle serve``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from ingle.config import EngineConfig
from ingle_server.config import ServerConfig

if TYPE_CHECKING:
    from ingle_server.model_entry import ModelEntry

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the signal's number."""
MAX_OPEN_FILES = 65536
"""Every connection needs one; the usual soft limit of 1,024 lets idle clients starve others."""


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve a model to OpenAI clients."""
    # Imports wait until here, so that `ingle --help` stays quick.
    from ingle.cli.demo_model import or_demo_model
    from ingle_server.listen import bind, check_certificate
    from ingle_server.model_entry import find_models

    started = time.perf_counter()
    if not server.is_loopback and not server.api_key:
        _say(
            f"WARNING: {server.host} is open to the network and anybody may use it: no --api-key "
            "is set. Give one, or listen on 127.0.0.1."
        )
    check_certificate(server)
    raise_file_limit()
    with contextlib.closing(bind(server)) as sock:
        names_one = engine.model or server.more_models or server.model_dir
        models = find_models(engine if names_one else or_demo_model(engine), server)
        return _serve_on(sock, models, server, started)


def _serve_on(
    sock: socket.socket, models: list[ModelEntry], server: ServerConfig, started: float
) -> int:
    from ingle_server.engine_adapter import load_engine

    # In a box: what is taken out of memory later must not live on in this function.
    box = []
    try:
        box.append(load_engine(models[0].config))
    except KeyboardInterrupt:
        _leave_at_once(INTERRUPTED)  # the thread that loads is in the middle of it

    async def main() -> int:
        from ingle_server.app import create_service_app
        from ingle_server.http_server import make_http_server
        from ingle_server.lifecycle import Lifecycle
        from ingle_server.model_manager import LoadedModel, ModelManager
        from ingle_server.ready import ready_text
        from ingle_server.service import Service

        first = LoadedModel(models[0], box.pop(), server)
        service = Service(ModelManager(models, load_engine, server, first), server)
        del first
        http = make_http_server(
            create_service_app(service),
            server,
            lambda: _say(ready_text(service, sock, time.perf_counter() - started)),
        )
        lifecycle = Lifecycle(service, http)
        lifecycle.install_signal_handlers()
        code = await lifecycle.run([sock])
        if lifecycle.is_held_up:
            _leave_at_once(code)
        return code

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def _leave_at_once(code: int) -> None:
    """Ends the process under a thread that computes: an orderly exit would wait for it, or pull
    the interpreter away from under it."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (it is not made for Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


def raise_file_limit() -> None:
    """Lets this process have as many files open as the system allows, 65,536 at most."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
