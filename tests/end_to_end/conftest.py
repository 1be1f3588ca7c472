"""transformers' answers, computed once for every test here, and an engine to compare with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from greedy_reference import Reference, answers, make_prompts
from live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def references(demo_model_dir: Path) -> list[Reference]:
    """transformers' greedy answers in float32 to all twenty prompts."""
    return answers(demo_model_dir, make_prompts(demo_model_dir))


@pytest.fixture(scope="session")
def few_references(demo_model_dir: Path) -> list[Reference]:
    """The same for nine of the prompts, up to 257 tokens long."""
    prompts = make_prompts(demo_model_dir)
    return answers(demo_model_dir, [p for p in prompts if len(p) <= 25 or len(p) == 257])


@pytest.fixture(scope="session")
def demo_server(
    demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A real server process with the real demo model, shared: leave it as it was."""
    flags = ("--enforce-eager", "--max-num-seqs", "64", "--served-model-name", "demo")
    with live_server(tmp_path_factory.mktemp("server"), demo_model_dir, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def exact_server(
    demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """The same in float32, where answers do not depend on the company they are in."""
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "demo")
    folder = tmp_path_factory.mktemp("exact-server")
    with live_server(folder, demo_model_dir, "--enforce-eager", *flags) as server:
        yield server
