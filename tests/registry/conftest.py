"""Real packages on disk: a module and its dist-info, found as pip's are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import invalidate_caches
from pathlib import Path

import pytest
import torch

from ingle.builtin.dense_linear import DenseWeight
from ingle.plugin import DeviceInfo, KernelUse
from ingle.registry.loader import load_plugins
from ingle.registry.plugin_registry import PluginRegistry
from ingle.registry.report import PluginReport

SOURCES = Path(__file__).parent / "packages"


@dataclass(frozen=True)
class SitePackages:
    """A folder on ``sys.path`` into which test packages are installed."""

    path: Path
    cache_folder: Path

    def install(self, *names: str) -> None:
        """Installs ``packages/NAME.py`` as distribution ``ingle-quant-NAME``, version 1.2."""
        for name in names:
            shutil.copy(SOURCES / f"{name}.py", self.path / f"ingle_test_{name}.py")
            self.describe(name, f"[ingle.plugins]\n{name} = ingle_test_{name}\n")
        invalidate_caches()

    def describe(self, name: str, entry_points: str) -> None:
        """Writes the metadata of a distribution."""
        folder = self.path / f"ingle_quant_{name}-1.2.dist-info"
        folder.mkdir()
        distribution = f"ingle-quant-{name.replace('_', '-')}"
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n"
        )
        (folder / "entry_points.txt").write_text(entry_points)

    def load(self, *disabled: str, strict: bool = False) -> PluginRegistry:
        """All plugins, with a cache folder of the test's own."""
        return load_plugins(disabled, strict, cache_folder=self.cache_folder)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SitePackages]:
    """An empty site-packages folder, first on ``sys.path``; what it held is forgotten after."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield SitePackages(folder, tmp_path / "cache")
    for module in [name for name in sys.modules if name.startswith("ingle_test_")]:
        del sys.modules[module]


@pytest.fixture
def cpu() -> DeviceInfo:
    """A CPU."""
    return DeviceInfo(type="cpu", total_memory=2**33, name="test processor")


@pytest.fixture
def use(cpu: DeviceInfo) -> KernelUse:
    """float32, one row to a hundred."""
    return KernelUse(device=cpu, dtype=torch.float32, rows=range(1, 101))


@pytest.fixture
def weight() -> DenseWeight:
    """A weight [24, 40] in float32."""
    return DenseWeight(torch.randn(24, 40, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def reported() -> object:
    """Finds a plugin's report by name."""

    def find(registry: PluginRegistry, name: str) -> PluginReport:
        return next(plugin for plugin in registry.report.plugins if plugin.name == name)

    return find
