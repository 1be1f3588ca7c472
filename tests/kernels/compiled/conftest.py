"""Collects nothing unless ``test_gates.py`` started this run."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("INGLE_KERNEL_GATE") != "compiled":
    collect_ignore_glob = ["test_*.py"]
