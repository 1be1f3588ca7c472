"""Engines with a cache of choice, in this process, with the cache plugins as if installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingle.config import EngineConfig
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore

Open = Callable[..., EngineCore]


def install(folder: Path, package: str, name: str, module: str) -> None:
    """Writes what an installed package leaves for its entry point."""
    info = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[ingle.plugins]\n{name} = {module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with fp8 caches in it; nothing checked before."""
    folder = tmp_path / "site"
    install(folder, "ingle-kv-fp8", "kv_fp8", "ingle_kv_fp8.plugin")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def open_core(site: Path) -> Open:
    """Opens an engine core on a CPU."""

    def opened(model: Path, cache: str, **options: Any) -> EngineCore:
        given = {"device": "cpu", "dtype": "float32", "enforce_eager": True, **options}
        return build_engine_core(EngineConfig(model=str(model), kv_cache_dtype=cache, **given))

    return opened


@pytest.fixture
def stranger(site: Path) -> None:
    """Somebody's package with a cache format of their own, installed beside the others."""
    shutil.copy(Path(__file__).parent / "stranger_cache.py", site)
    install(site, "someones-cache", "someones_cache", "stranger_cache")
