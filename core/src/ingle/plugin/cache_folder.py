"""Where Ingle keeps what it has measured or compiled once."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_folder() -> Path:
    """``$INGLE_CACHE``, or ``~/.cache/ingle``."""
    return Path(os.environ.get("INGLE_CACHE") or Path.home() / ".cache" / "ingle")
