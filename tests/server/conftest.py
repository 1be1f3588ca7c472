"""Fixtures: a server that many tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

# pytest's importlib mode leaves the tests' own folder off the path.
sys.path.insert(0, str(Path(__file__).parent))

from server_under_test import Running, running_server


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for tests that leave it as it was."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def http(shared: Running) -> Iterator[httpx.Client]:
    with shared.client() as client:
        yield client
