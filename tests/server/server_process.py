"""``ingle serve`` with the fake engine, as a program: server_process.py HOLD FLAGS..."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from server_fake_engine import FakeEngine

from ingle import EngineConfig
from ingle.cli import app as cli_app
from ingle.cli.app import run
from ingle.cli.flags import make_command
from ingle_server import engine_adapter
from ingle_server.command import serve


def load(config: EngineConfig, _on_progress: object = None) -> FakeEngine:
    print(f"loading {config.model}", file=sys.stderr, flush=True)
    return FakeEngine(hold=int(sys.argv[1]) or None)


with (
    mock.patch.object(engine_adapter, "load_engine", load),
    mock.patch.object(cli_app, "find_command", lambda name, *_: make_command(name, serve)),
):
    sys.exit(run(["serve", "fake/model", *sys.argv[2:]]))
