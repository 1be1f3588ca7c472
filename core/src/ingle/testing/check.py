"""The conformance kit on an installed plugin: what ``ingle plugins check NAME`` runs.

Everything that needs no sample is tested of any plugin. Golden values are the author's: a module
``<package>.conformance`` with classes of the kit is run as well, where there is one.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from ingle.plugin import DeviceInfo
from ingle.registry.plugin_registry import PluginRegistry
from ingle.registry.record import PluginRecord, spelling
from ingle.testing.foreign import FOREIGN_CHECKPOINTS

_HEAD = '''"""Written by ``ingle plugins check``."""
from ingle.testing import KVCacheFormatConformance, PluginConformance
from ingle.testing.sample_free import AffineKernels, FormatWithoutSamples
from ingle.plugin import WeightFormat
'''


def check_plugin(registry: PluginRegistry, record: PluginRecord) -> int:
    """Runs the kit on the plugin of ``record``, printing as pytest does; pytest's exit code."""
    import pytest

    with TemporaryDirectory() as folder:
        suite = Path(folder) / "test_conformance.py"
        suite.write_text(suite_for(registry, record), encoding="utf-8")
        arguments = ["-v", "--no-header", "-p", "no:cacheprovider", f"--rootdir={folder}"]
        targets = [str(suite), *_own_suite(record)]
        return int(pytest.main([*arguments, "-c", "/dev/null", *targets]))


def suite_for(registry: PluginRegistry, record: PluginRecord) -> str:
    """The test module for one plugin: a class of the kit for everything it offers."""
    cpu = DeviceInfo(type="cpu")
    module = f"    plugin_module = {record.module!r}\n"
    parts = [_HEAD, f"class TestPlugin(PluginConformance):\n{module}"]
    for offer in registry.weight_formats():
        if offer.record is record:
            own = {spelling(name) for name in (offer.item.name, *offer.item.aliases)}
            reads = sorted(kind for kind in FOREIGN_CHECKPOINTS if spelling(kind.split()[0]) in own)
            parts.append(
                f"class TestFormat_{spelling(offer.item.name).replace('-', '_')}"
                f"(FormatWithoutSamples):\n{module}    format_name = {offer.item.name!r}\n"
                f"    reads = frozenset({reads!r})\n"
            )
    if any(offer.record is record for offer in registry.matmul_kernels(cpu)):
        parts.append(f"class TestKernels(AffineKernels):\n{module}")
    for cache in registry.kv_cache_formats(cpu):
        if cache.record is record:
            parts.append(
                f"class TestCache_{spelling(cache.item.name).replace('-', '_')}"
                f"(KVCacheFormatConformance):\n{module}    format_name = {cache.item.name!r}\n"
            )
    return "\n\n".join(parts)


def _own_suite(record: PluginRecord) -> list[str]:
    package = record.module.rpartition(".")[0]
    found = find_spec(f"{package}.conformance") if package else None
    return [found.origin] if found is not None and found.origin else []
