"""``ingle version``."""

from __future__ import annotations

import platform
from importlib.metadata import distributions
from typing import Final

from ingle import __version__

_SHOWN: Final = ("torch", "triton", "transformers", "tokenizers", "safetensors")


def version() -> None:
    """Print the versions of Ingle, its plugins and what it stands on."""
    print(f"ingle {__version__}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    found = {dist.name: dist.version for dist in distributions()}
    for name in sorted(found):
        if name in _SHOWN or name.startswith("ingle-"):
            print(f"{name} {found[name]}")
