"""``ingle`` with faults on order: faulty_server.py ORDERS ARGUMENTS...

The file ORDERS names what the engine's next step does instead of computing; a step that does it
takes the order away first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from ingle.cli.app import run
from ingle.engine.model_runner import ModelRunner

ORDERS = Path(sys.argv[1])
FIRST_FEW = 3
compute = ModelRunner._execute


def fail() -> NoReturn:
    raise RuntimeError("a kernel failed at 0x7f0000000000")


def exhaust() -> NoReturn:
    """What torch really raises: nobody has an exbibyte."""
    torch.empty(1 << 60, dtype=torch.uint8)
    raise AssertionError


def hang() -> NoReturn:
    """Outside of Python, where nothing can interrupt it."""
    ctypes.CDLL(None).sleep(3600)
    raise AssertionError


def leave() -> NoReturn:
    """The thread ends without an Exception that its loop would catch."""
    raise SystemExit(0)


def segfault() -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


DEEDS = {"fail": fail, "exhaust": exhaust, "hang": hang, "leave": leave, "segfault": segfault}


def execute(self: ModelRunner, plan: Any) -> Any:
    order = ""
    with contextlib.suppress(FileNotFoundError):
        order = ORDERS.read_text()
        if order == "exhaust" and len(plan.scheduled) < FIRST_FEW:
            order = ""  # until there is something worth keeping
        if order:
            ORDERS.unlink()
    if order:
        DEEDS[order]()
    return compute(self, plan)


with mock.patch.object(ModelRunner, "_execute", execute):
    sys.exit(run(sys.argv[2:]))
