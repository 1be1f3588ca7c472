"""One loaded demo model for all command tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingle.cli.session import Session
from ingle.config import EngineConfig


@pytest.fixture(scope="session")
def demo_session(demo_model_dir: Path) -> Session:
    """The demo model, loaded in float32 so that answers do not depend on the machine."""
    return Session.open(EngineConfig(model=str(demo_model_dir), dtype="float32"))


@pytest.fixture
def demo_commands(
    demo_session: Session, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[EngineConfig]]:
    """Lets commands open the demo model without loading it again; gives what they asked for."""
    asked: list[EngineConfig] = []

    def open_session(config: EngineConfig) -> Session:
        asked.append(config)
        return demo_session

    monkeypatch.setattr(Session, "open", open_session)
    yield asked
    assert not demo_session.core.has_work()
