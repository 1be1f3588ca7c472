"""transformers' answers, computed once for every test here, and an engine to compare with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from greedy_reference import Reference, answers, make_prompts


@pytest.fixture(scope="session")
def references(demo_model_dir: Path) -> list[Reference]:
    """transformers' greedy answers in float32 to all twenty prompts."""
    return answers(demo_model_dir, make_prompts(demo_model_dir))


@pytest.fixture(scope="session")
def few_references(demo_model_dir: Path) -> list[Reference]:
    """The same for nine of the prompts, up to 257 tokens long."""
    prompts = make_prompts(demo_model_dir)
    return answers(demo_model_dir, [p for p in prompts if len(p) <= 25 or len(p) == 257])
