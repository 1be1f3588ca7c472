"""Memory of the host, as its files tell it. All sizes in bytes. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
GIB: Final = 1024**3
UNKNOWN_AVAILABLE: Final = 8 * GIB
"""Taken where the system says nothing at all."""


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """Where a version of control groups is mounted, and what its files and figures are called
    (Linux, admin-guide/cgroup-v2 and cgroup-v1/memory)."""

    mount: str
    limit: str
    used: str
    inactive: str


GROUP_FILES: Final = (
    GroupFiles("", "memory.max", "memory.current", "inactive_file"),
    GroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes(root: Path = ROOT) -> int:
    """Memory a program can take now without swapping: what the system has left, or what the
    process's control groups leave of it when that is less.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    limits = list(_group_rooms(root))
    return max(0, min([_system_available(root), *limits]))


def resident_host_bytes(root: Path = ROOT) -> int | None:
    """Anonymous memory this process holds (``RssAnon``: no mapped files), or None where the
    system does not say."""
    return _field(root / "proc/self/status", "RssAnon:")


def total_host_bytes() -> int:
    """Memory the machine has in all; 0 where the system does not say."""
    return _pages("SC_PHYS_PAGES") or 0


def _system_available(root: Path) -> int:
    found = _field(root / "proc/meminfo", "MemAvailable:")
    if found is not None:
        return found
    free = _pages("SC_AVPHYS_PAGES")
    if free is not None:
        return free
    total = _pages("SC_PHYS_PAGES")
    return UNKNOWN_AVAILABLE if total is None else total // 2


def _pages(name: str) -> int | None:
    try:
        count = os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return count if count > 0 else None


def _field(path: Path, name: str) -> int | None:
    """A figure in kB of a file of ``Name:   123 kB`` lines."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name] and len(words) > 1 and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _group_rooms(root: Path) -> Iterator[int]:
    """What each control group from the process's own up to the top leaves, of either version."""
    for files in GROUP_FILES:
        base = root / "sys/fs/cgroup" / files.mount
        folder = base / _group_path(root, files.mount)
        for group in (folder, *folder.parents):
            if not group.is_relative_to(base):
                break
            limit, used = _number(group / files.limit), _number(group / files.used)
            if limit is not None:
                yield limit - max(0, (used or 0) - _inactive_file(group, files.inactive))


def _group_path(root: Path, controller: str) -> str:
    """The process's group below its mount; of version 2 where ``controller`` is empty."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _inactive_file(group: Path, key: str) -> int:
    """File pages the group counts as its own and gives up on demand."""
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
