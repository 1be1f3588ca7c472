"""Fixtures shared by every test folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's folder in the user's cache, made on first use; never write to it."""
    from ingle.demo_model import default_demo_model

    return default_demo_model()
