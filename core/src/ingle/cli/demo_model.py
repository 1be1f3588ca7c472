"""``ingle demo-model``, and the demo model where no model is named."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from ingle.config import EngineConfig


def demo_model(folder: Path) -> None:
    """Write the demo model (SmolLM2-135M-Instruct, bf16) to a new folder.

    Args:
        folder: Where to write it; made by this command.
    """
    from ingle.demo_model import make_demo_model

    print(make_demo_model(folder))


def or_demo_model(engine: EngineConfig) -> EngineConfig:
    """``engine``, with the demo model when it names none; says so on stderr.

    Raises:
        CheckpointError: When the demo model has to be made and its package is missing.
    """
    if engine.model:
        return engine
    from ingle.demo_model import DEMO_MODEL_NAME, default_demo_model
    from ingle.plugin.cache_folder import default_cache_folder

    folder = default_demo_model(default_cache_folder())
    print(f"ingle: no model given, so this is the demo model {DEMO_MODEL_NAME}.", file=sys.stderr)
    return dataclasses.replace(engine, model=str(folder))
