"""``python -m ingle`` is ``ingle``."""

from __future__ import annotations

import sys

from ingle.cli import main

if __name__ == "__main__":
    sys.exit(main())
