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
