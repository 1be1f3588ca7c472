"""The tutorial's code is a plugin that loads and passes the kit."""

from __future__ import annotations

import re
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from ingle.testing.plugin_module import inherited_tests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write_a_plugin.md"


@pytest.fixture
def tutorial(site):
    """The package of the page, written out as the page says."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    plugin, format_, conformance = blocks[:3]
    package = site.path / "ingle_test_rowint8"
    package.mkdir()
    rename = ("ingle_quant_rowint8", "ingle_test_rowint8")
    for name, text in (("plugin", plugin), ("format", format_), ("conformance", conformance)):
        (package / f"{name}.py").write_text(text.replace(*rename))
    (package / "__init__.py").write_text("")
    site.describe("rowint8", "[ingle.plugins]\nrowint8 = ingle_test_rowint8.plugin\n")
    invalidate_caches()
    return site


def test_the_tutorials_plugin_loads(tutorial, reported) -> None:
    plugin = reported(tutorial.load(), "rowint8")
    assert (plugin.status, plugin.reason, plugin.weight_formats) == ("ok", "", ("rowint8",))


def test_the_tutorials_plugin_passes_the_kit(tutorial) -> None:
    kit = import_module("ingle_test_rowint8.conformance").TestRowInt8
    names = inherited_tests(kit)
    assert len(names) > 10
    for name in names:
        getattr(kit(), name)()
