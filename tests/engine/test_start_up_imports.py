"""What a start pays for in imports."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["torch._dynamo", "torch._inductor", "sympy", "triton"])
def test_the_engine_does_not_import_torchs_compiler(module: str) -> None:
    """It takes more than a second, and neither serving nor loading a compiled package needs it."""
    code = f"import ingle.engine.engine, sys; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_garbage_collection_rests_while_torch_is_imported_and_goes_on_afterwards() -> None:
    code = (
        "import gc, sys; from ingle.engine.first_import import import_builder;"
        "rounds = sum(one['collections'] for one in gc.get_stats());"
        "build = import_builder();"
        "assert sum(one['collections'] for one in gc.get_stats()) == rounds;"
        "assert build.__name__ == 'build_engine_core' and gc.isenabled();"
        "frozen = gc.get_freeze_count(); assert frozen > 10_000;"
        "assert import_builder() is build and gc.get_freeze_count() <= frozen"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
