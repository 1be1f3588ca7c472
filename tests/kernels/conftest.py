"""Fixtures of both gates. Their module is imported in them: it brings transformers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def installed_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format plugins as if they were installed, and no self-check from an earlier run."""
    from packed_model import install_plugins

    install_plugins(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Path:
    """See ``write_packed``."""
    from packed_model import write_packed

    folder = tmp_path_factory.mktemp("gptq")
    write_packed(folder, demo_model_dir)
    return folder
