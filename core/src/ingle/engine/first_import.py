"""Imports the engine, and torch with it, quickly. No torch here until then."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingle.engine.engine_core import EngineCore


def import_builder() -> Callable[..., EngineCore]:
    """``build_engine_core``.

    The first time, the collector of cyclic garbage rests meanwhile, and what there is afterwards is
    left out of its later rounds: torch makes some million objects that all stay, and going through
    them takes an eighth of the import's time, and tens of milliseconds of a running server's now
    and then.
    """
    is_first = "torch" not in sys.modules and gc.isenabled()
    if is_first:
        gc.disable()
    try:
        from ingle.engine.engine import build_engine_core
    finally:
        if is_first:
            gc.enable()
            gc.freeze()
    return build_engine_core
