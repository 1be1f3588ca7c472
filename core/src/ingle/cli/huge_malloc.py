"""Restarts the command with a malloc that asks for huge pages, before anything is loaded.

Packed weights and activations lie in memory that torch gets from malloc. In pages of 4 KiB a
product reads its weight at half the speed of one in pages of 2 MiB (docs/benchmarks.md). The C
library takes this choice from its environment, once, when a process starts; so the process starts
again, under the same number, which costs 20 ms.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.malloc.hugetlb"
ASKED: Final = f"{TUNABLE}=1"
OLDEST: Final = (2, 35)
"""The first C library that knows the tunable (its release notes)."""
COMMANDS: Final = frozenset({"serve", "bench", "chat", "generate", "eval", "quantize"})
"""Subcommands that run a model; the others are done before it would pay."""


def changed_environment(
    argv: Sequence[str], environment: Mapping[str, str], libc: str | None
) -> dict[str, str] | None:
    """The environment to start again in, or None to go on as it is.

    Args:
        argv: What follows ``ingle``.
        environment: As it is now. Whoever sets the tunable, to 0 too, is obeyed.
        libc: The C library's name and version ("glibc 2.36"); None when it is another one.
    """
    tunables = environment.get(VARIABLE, "")
    if not argv or argv[0] not in COMMANDS or TUNABLE in tunables or not _knows_tunable(libc):
        return None
    return {**environment, VARIABLE: f"{tunables}:{ASKED}" if tunables else ASKED}


def _knows_tunable(libc: str | None) -> bool:
    name, _, version = (libc or "").partition(" ")
    numbers = version.split(".")
    if name != "glibc" or len(numbers) < 2 or not all(part.isdigit() for part in numbers):
        return False
    return (int(numbers[0]), int(numbers[1])) >= OLDEST


def restart_with_huge_pages() -> None:
    """Starts this process again with the tunable set, where that helps; else returns."""
    environment = changed_environment(sys.argv[1:], os.environ, _libc())
    if environment is not None and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
