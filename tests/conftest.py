"""Fixtures shared by every test folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's folder in the user's cache, made on first use; never write to it."""
    from ingle.demo_model import default_demo_model

    return default_demo_model()


def _beside_the_quantizers(name: str) -> ModuleType:
    """A module of ``tests/quantize``; test folders are no packages."""
    path = Path(__file__).parent / "quantize" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def exl2_validity() -> ModuleType:
    """The checker of EXL2 folders."""
    return _beside_the_quantizers("exl2_validity")


@pytest.fixture(scope="session")
def packed_reader() -> ModuleType:
    """The reader of AWQ and GPTQ folders that shares nothing with Ingle."""
    return _beside_the_quantizers("packed_reader")
