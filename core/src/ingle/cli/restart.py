"""Starts the command again with settings that C libraries read once, before anything is loaded.

- glibc's malloc asks for huge pages. Packed weights and activations lie in its memory, and in pages
  of 4 KiB a product reads its weight at half the speed of one in pages of 2 MiB.
- It keeps what a prompt's activations leave behind, instead of giving it back to the system after
  every layer and asking for new pages, which the system clears first, in the next.
- GNU's OpenMP spins a bounded time at a barrier, of which a decode step has hundreds. Left alone it
  spins for milliseconds: that costs nothing on idle cores, but beside other work each barrier burns
  the time slice that the other thread waits for. Without spinning every barrier is a system call.

The process keeps its number; starting again costs 20 ms. Measured in docs/benchmarks.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

TUNABLES: Final = "GLIBC_TUNABLES"
MALLOC: Final = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 32 * 1024**2,
    "glibc.malloc.trim_threshold": 256 * 1024**2,
}
"""Huge pages; the largest piece that comes from the kept memory, which is the largest glibc takes;
and how much of that may lie unused at its end."""
OLDEST: Final = (2, 35)
"""The first glibc that knows the tunable (its release notes)."""
SPIN_COUNT: Final = "GOMP_SPINCOUNT"
SPINS: Final = "4000"
"""Rounds of a barrier's loop, some 0.2 ms: longer than Python takes between two layers, shorter
than between two steps."""
WAIT_POLICY: Final = "OMP_WAIT_POLICY"
COMMANDS: Final = frozenset({"serve", "bench", "chat", "generate", "eval", "quantize"})
"""Subcommands that run a model; the others are done before it would pay."""


def changed_environment(
    argv: Sequence[str], environment: Mapping[str, str], libc: str | None
) -> dict[str, str] | None:
    """The environment to start again in, or None to go on as it is.

    Args:
        argv: What follows ``ingle``.
        environment: As it is now. What is set in it stays: whoever sets a tunable (to 0, too),
            the spin count or the wait policy is obeyed.
        libc: The C library's name and version ("glibc 2.36"); None when it is another one.
    """
    if not argv or argv[0] not in COMMANDS or not _is_glibc(libc):
        return None
    changes = {}
    tunables = environment.get(TUNABLES, "")
    missing = [f"{name}={value}" for name, value in MALLOC.items() if name not in tunables]
    if missing:
        changes[TUNABLES] = ":".join(filter(None, (tunables, *missing)))
    if SPIN_COUNT not in environment and WAIT_POLICY not in environment:
        changes[SPIN_COUNT] = SPINS
    return {**environment, **changes} if changes else None


def _is_glibc(libc: str | None) -> bool:
    """Whether it is one that knows the tunable."""
    name, _, version = (libc or "").partition(" ")
    numbers = version.split(".")
    if name != "glibc" or len(numbers) < 2 or not all(part.isdigit() for part in numbers):
        return False
    return (int(numbers[0]), int(numbers[1])) >= OLDEST


def restart_with_settings(argv: Sequence[str] | None = None) -> None:
    """Starts this process again with the settings that are missing; returns when none is.

    ``argv``: what would follow ``ingle``; None: what follows the program's name.
    """
    given = sys.argv[1:] if argv is None else argv
    environment = changed_environment(given, os.environ, _libc())
    if environment is not None and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
