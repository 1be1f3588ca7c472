"""Fixtures shared by every test folder."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

QUANTIZE = Path(__file__).parent / "quantize"


@pytest.hookimpl(trylast=True)  # when -m has taken out what does not run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """pytest-xdist runs one of several tests with the same id, and says nothing of the others."""
    counts = Counter(item.nodeid for item in items)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice and hasattr(config, "workerinput"):
        raise pytest.UsageError(f"these have the ids of other tests, run them without -n: {twice}")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's folder in the user's cache, made on first use; never write to it."""
    from ingle.demo_model import default_demo_model

    return default_demo_model()


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def import_file() -> Callable[[Path], ModuleType]:
    """Imports one file under its own name: test folders are no packages."""
    return _import_file


@pytest.fixture(scope="session")
def exl2_validity() -> ModuleType:
    """The checker of EXL2 folders."""
    return _import_file(QUANTIZE / "exl2_validity.py")


@pytest.fixture(scope="session")
def packed_reader() -> ModuleType:
    """The reader of AWQ and GPTQ folders that shares nothing with Ingle."""
    return _import_file(QUANTIZE / "packed_reader.py")
