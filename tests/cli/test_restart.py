"""The command starts again with what C libraries read once: huge pages, bounded spinning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ingle.cli.restart import SPIN_COUNT, SPINS, TUNABLES, WAIT_POLICY, changed_environment

GLIBC = "glibc 2.36"
KEEPS = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456"
ASKED = f"glibc.malloc.hugetlb=1:{KEEPS}"
ALL = {TUNABLES: ASKED, SPIN_COUNT: SPINS}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        pytest.param({"HOME": "/root"}, {"HOME": "/root", **ALL}, id="both"),
        pytest.param(
            {TUNABLES: "glibc.malloc.check=1"},
            {TUNABLES: f"glibc.malloc.check=1:{ASKED}", SPIN_COUNT: SPINS},
            id="other-tunables-stay",
        ),
        pytest.param(
            {TUNABLES: "glibc.malloc.hugetlb=0"},
            {TUNABLES: f"glibc.malloc.hugetlb=0:{KEEPS}", SPIN_COUNT: SPINS},
            id="huge-pages-refused",
        ),
        pytest.param(
            {TUNABLES: f"{ASKED}0"}, {TUNABLES: f"{ASKED}0", SPIN_COUNT: SPINS}, id="more-is-kept"
        ),
        pytest.param(
            {WAIT_POLICY: "passive"}, {WAIT_POLICY: "passive", TUNABLES: ASKED}, id="a-wait-policy"
        ),
        pytest.param({SPIN_COUNT: "7"}, {SPIN_COUNT: "7", TUNABLES: ASKED}, id="a-spin-count"),
    ],
)
def test_commands_that_run_a_model_get_what_is_not_set(
    environment: dict[str, str], wanted: dict[str, str]
) -> None:
    assert changed_environment(["serve", "/models/m"], environment, GLIBC) == wanted


@pytest.mark.parametrize(
    ("argv", "environment", "libc"),
    [
        pytest.param(["fit", "/models/m"], {}, GLIBC, id="nothing-is-run"),
        pytest.param([], {}, GLIBC, id="no-command"),
        pytest.param(["serve"], ALL, GLIBC, id="all-set-already"),
        pytest.param(["serve"], {}, "glibc 2.31", id="an-old-library"),
        pytest.param(["serve"], {}, None, id="musl"),
    ],
)
def test_what_gains_nothing_goes_on(
    argv: list[str], environment: dict[str, str], libc: str | None
) -> None:
    assert changed_environment(argv, environment, libc) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's C library")
def test_a_restart_keeps_process_and_arguments() -> None:
    program = (
        "import os, sys\n"
        "from ingle.cli import restart\n"
        "sys.argv = ['ingle', 'serve', *sys.argv[1:]]\n"
        "print(os.getpid(), os.environ.get('GLIBC_TUNABLES', ''), sys.argv[2:], flush=True)\n"
        "restart.restart_with_settings()\n"
    )
    unset = {*ALL, WAIT_POLICY}
    done = subprocess.run(
        [sys.executable, "-c", program, "a b", "--flag"],
        env={name: value for name, value in os.environ.items() if name not in unset},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after = done.stdout.splitlines()
    number = before.split()[0]
    assert before == f"{number}  ['a b', '--flag']"
    assert after == f"{number} {ASKED} ['a b', '--flag']"
