"""What the system says of this process: its age, its memory."""

from __future__ import annotations

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")


def age_seconds() -> float | None:
    """Seconds since this process was started, in steps of 0.01; None where that is not known."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii")
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return None
    # The name in parentheses may hold anything; behind it, the start is the 20th number.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return float(uptime - ticks / os.sysconf("SC_CLK_TCK"))


def memory_bytes() -> dict[str, int]:
    """``resident`` and ``peak`` memory, as far as the system says."""
    names = {"VmRSS": "resident", "VmHWM": "peak"}
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = (line.partition(":")[::2] for line in lines)
    return {names[name]: int(value.split()[0]) * 1024 for name, value in fields if name in names}
