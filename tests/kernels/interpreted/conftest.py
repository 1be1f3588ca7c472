"""Collects nothing unless ``test_gates.py`` started this run; then repairs the interpreter."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("INGLE_KERNEL_GATE") == "interpreted":
    import torch

    from ingle.testing.triton_interpreter import install

    torch.set_num_threads(1)
    install(check="races")
else:
    collect_ignore_glob = ["test_*.py"]
