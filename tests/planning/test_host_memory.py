"""What the host's files say of its memory, and what happens where they do not exist."""

from __future__ import annotations

from pathlib import Path

from ingle.engine.host_memory import available_host_bytes, resident_host_bytes

MIB = 1024**2


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def system(root: Path, available_mib: int) -> None:
    write(root / "proc/meminfo", f"MemTotal: 999 kB\nMemAvailable: {available_mib * 1024} kB\n")


def test_without_limits_it_is_what_the_system_has_left(tmp_path: Path) -> None:
    system(tmp_path, 512)
    assert available_host_bytes(tmp_path) == 512 * MIB


def test_without_meminfo_the_page_count_answers(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) > 0
    assert resident_host_bytes(tmp_path) is None


def test_a_control_group_counts_when_it_leaves_less(tmp_path: Path) -> None:
    system(tmp_path, 512)
    write(tmp_path / "proc/self/cgroup", "0::/box/inner\n")
    group = tmp_path / "sys/fs/cgroup/box"
    write(group / "memory.max", f"{300 * MIB}\n")
    write(group / "memory.current", f"{200 * MIB}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {50 * MIB}\n")
    write(group / "inner/memory.max", "max\n")
    assert available_host_bytes(tmp_path) == 150 * MIB


def test_a_control_group_of_version_1_counts_by_its_own_names(tmp_path: Path) -> None:
    system(tmp_path, 512)
    write(tmp_path / "proc/self/cgroup", "9:cpu:/other\n4:memory:/box\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory/box"
    write(group / "memory.limit_in_bytes", f"{300 * MIB}\n")
    write(group / "memory.usage_in_bytes", f"{200 * MIB}\n")
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {50 * MIB}\n")
    write(group.parent / "memory.limit_in_bytes", "9223372036854771712\n")  # none
    assert available_host_bytes(tmp_path) == 150 * MIB


def test_in_a_container_the_group_of_version_1_is_mounted_at_the_top(tmp_path: Path) -> None:
    system(tmp_path, 512)
    write(tmp_path / "proc/self/cgroup", "4:memory:/docker/0123\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", f"{64 * MIB}\n")
    write(group / "memory.usage_in_bytes", f"{4 * MIB}\n")
    assert available_host_bytes(tmp_path) == 60 * MIB


def test_a_full_control_group_leaves_nothing(tmp_path: Path) -> None:
    system(tmp_path, 512)
    write(tmp_path / "sys/fs/cgroup/memory.max", str(100 * MIB))
    write(tmp_path / "sys/fs/cgroup/memory.current", str(120 * MIB))
    assert available_host_bytes(tmp_path) == 0


def test_anonymous_memory_is_read_from_status(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/status", "Name:\tx\nVmRSS:\t9 kB\nRssAnon:\t 2048 kB\n")
    assert resident_host_bytes(tmp_path) == 2 * MIB
